"""Layer 6: the chart on real nodes, pools of real engines that answer real prefills, and everything that may happen to them."""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefill_bed.api import ApiError, Json, conditions, is_ready
from prefill_bed.cluster import Cluster
from prefill_bed.engine_pod import GRPC_PORT, ask
from prefill_bed.installation import Release
from prefill_bed.pools import PoolView, ReadyWatch, cpu_pool, expect
from prefill_bed.waiting import until

Figure = Callable[[str], None]
SLOW = 400
"""Deadline of a state that needs engines to start: 15 s each on a quiet machine of two cores."""


@pytest.fixture
def start(release: Release, new_namespace: Callable[[Cluster], str], checkpoint: Path) -> Callable[..., PoolView]:
    """A pool of the CPU profile in a namespace of its own; keywords are fields of its spec."""

    def make(**spec: object) -> PoolView:
        view = PoolView(release.cluster, new_namespace(release.cluster), "tiny")
        view.create(cpu_pool("tiny", checkpoint, **spec))
        return view

    return make


def answers(view: PoolView, checkpoint: Path, work: Path) -> str:
    """A prefill by one ready pod, checked by the decode probe; the line with its time."""
    pod = view.ready()[0]
    answer = ask(f"{pod['status']['podIP']}:{GRPC_PORT}", checkpoint, work)
    assert answer.ok, answer.text
    return next(line.strip() for line in answer.text.splitlines() if line.lstrip().startswith("TTFT"))


def gpus_of(view: PoolView) -> list[str]:
    """Asked for, pod by pod."""
    return sorted(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in view.live())


def restarts(pod: Json) -> int:
    count: int = pod["status"]["containerStatuses"][0]["restartCount"]
    return count


def seconds_until(what: str, check: Callable[[], object], *, limit: float = SLOW) -> float:
    begin = time.monotonic()
    until(what, check, seconds=limit)
    return time.monotonic() - begin


@pytest.mark.short
def test_life_of_a_pool(
    release: Release, start: Callable[..., PoolView], checkpoint: Path, tmp_path: Path, figure: Figure
) -> None:
    """Installed, Ready, a prefill answered, a pod deleted and replaced, drained to zero: kubectl get says so at each step."""
    begin = time.monotonic()
    view = start(replicas=1)
    view.wait_settled(2, seconds=SLOW)
    figure(f"Ready after {time.monotonic() - begin:.0f} s")
    figure(answers(view, checkpoint, tmp_path))
    whole = {
        "DESIRED": 1,
        "READY": 2,
        "UP_TO_DATE": 2,
        "SPARES": 1,
        "EP": 2,
        "DEVICE": "cpu",
        "LOADING": 0,
        "DRAINING": 0,
    }
    whole |= {"AVAILABLE": "True", "REDUNDANT": "True", "MODEL_REV": "r1", "REASON": "AllReady"}
    view.wait_row(**whole)
    victim = view.ready()[0]["metadata"]["name"]
    begin = time.monotonic()
    view.cluster.kubectl("delete", "pod", victim, "-n", view.namespace, "--wait=false")
    view.wait("a replacement", lambda: expect(len(set(view.names()) - {victim}) == 2, view.names()), seconds=30)
    figure(f"replacement created after {time.monotonic() - begin:.1f} s")
    view.wait_row(READY=1, LOADING=1, AVAILABLE="True", REDUNDANT="False", REASON="AllReady")
    view.wait_settled(2, seconds=SLOW)
    view.wait_row(**whole)
    figure(answers(view, checkpoint, tmp_path))
    begin = time.monotonic()
    view.change(replicas=0)
    view.wait("no pods", lambda: expect(not view.pods(), view.names()), seconds=120)
    figure(f"drained to zero in {time.monotonic() - begin:.1f} s")
    view.wait_condition("Available", "True", "ScaledToZero")
    view.wait_row(DESIRED=0, READY=0, UP_TO_DATE=0, LOADING=0, DRAINING=0, AVAILABLE="True", REASON="ScaledToZero")
    assert "2 of 2 PEs are to go" in view.wait_event("LargeScaleDown")


@pytest.mark.short
def test_operator_pods(release: Release) -> None:
    """Two operator pods, not root, Ready, without restarts; one holds the Lease."""
    pods = release.pods()
    assert [is_ready(pod) for pod in pods] == [True, True]
    assert all(restarts(pod) == 0 for pod in pods)
    assert all(pod["spec"]["securityContext"]["runAsNonRoot"] for pod in pods)
    assert release.leader()["metadata"]["name"] in {pod["metadata"]["name"] for pod in pods}


@pytest.mark.short
def test_helm_test(release: Release) -> None:
    """helm test, from the image just built: pools are accepted and refused, and an operator leads."""
    said = release.test()
    lines = [line for line in said.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert len(lines) == 3, said
    assert all(line.startswith("ok ") for line in lines), said


def test_image_change_rolls(start: Callable[..., PoolView], checkpoint: Path, tmp_path: Path, figure: Figure) -> None:
    """A changed argument replaces every engine, one after the other, never below N + S ready."""
    view = start(replicas=1)
    view.wait_settled(2, seconds=SLOW)
    old = set(view.names())
    with ReadyWatch(view) as watch:
        begin = time.monotonic()
        view.change(engine={"args": ["--log-level", "WARNING"]})
        view.wait_row(READY=2, AVAILABLE="True", REASON="RolloutInProgress")
        view.wait("only new pods", lambda: expect(not old & set(view.names()), view.names()), seconds=SLOW)
        view.wait_settled(2, seconds=SLOW)
        figure(f"2 engines replaced in {time.monotonic() - begin:.0f} s, lowest ready count {watch.lowest}")
        assert watch.lowest >= 2
    view.wait_row(READY=2, UP_TO_DATE=2, LOADING=0, DRAINING=0, REASON="AllReady")
    view.wait_event("RolloutComplete")
    answers(view, checkpoint, tmp_path)


def test_engine_killed(start: Callable[..., PoolView], figure: Figure) -> None:
    """kill -9 of an engine: the kubelet restarts it in place, the same pod is Ready again, no pod is replaced."""
    view = start(replicas=1)
    view.wait_settled(2, seconds=SLOW)
    pod = view.ready()[0]
    processes = view.cluster.engine_processes(pod)
    assert processes, "no engine process found"
    os.kill(processes[0], signal.SIGKILL)

    def restarted() -> None:
        now = view.cluster.api.get("pods", view.namespace, pod["metadata"]["name"])
        assert now["status"]["containerStatuses"][0]["restartCount"] == 1, now["status"]["containerStatuses"]
        assert is_ready(now), "not ready"

    took = seconds_until("the engine to be back", restarted)
    figure(f"ready again after {took:.0f} s")
    view.wait_settled(2, seconds=SLOW)


def test_engine_out_of_host_memory(start: Callable[..., PoolView], figure: Figure) -> None:
    """A memory limit far too small: OOMKilled shows up in the pool's message, the EP stays, a larger limit heals it."""
    small = {"requests": {"memory": "100Mi"}, "limits": {"memory": "250Mi"}}
    begin = time.monotonic()
    view = start(replicas=1, quota={"redundancy": {"mode": "None"}}, engine={"resources": small})

    def said() -> None:
        text = json.dumps(view.status())
        assert "OOMKilled" in text, text

    view.wait("OOMKilled in the status", said, seconds=SLOW)
    figure(f"said after {time.monotonic() - begin:.0f} s")
    view.wait_row(READY=0, EP=2, AVAILABLE="False", REASON="NotEnoughReady")
    begin = time.monotonic()
    view.change(engine={"resources": {"requests": {"memory": "512Mi"}, "limits": {"memory": "3Gi"}}})
    view.wait_settled(1, seconds=SLOW)
    figure(f"Ready {time.monotonic() - begin:.0f} s after the limit was raised, still EP 2")
    view.wait_row(READY=1, EP=2, REASON="AllReady")
    view.wait_condition("PlanFeasible", "True", "MinimumEP")
    assert "prefill.dev/ep-floor" not in view.get()["metadata"].get("annotations", {})


def test_out_of_memory_exits_raise_ep(start: Callable[..., PoolView], figure: Figure) -> None:
    """Engines that end with exit 12 on two nodes: the next EP, as many GPUs asked for; without the fault the pool is Ready so."""
    view = start(
        replicas=2,
        quota={"redundancy": {"mode": "None"}},
        scheduling={"placement": "SpreadRequired"},
        engine={"args": ["--fault", "exit=12@warmup"]},
        cpu={"pretendGPUs": True},
        expertParallel={"max": 4},
    )
    begin = time.monotonic()
    view.wait_row(EP=2)
    view.wait_condition("PlanFeasible", "True", "Escalated", seconds=SLOW)
    figure(f"escalated after {time.monotonic() - begin:.0f} s")
    assert view.get()["metadata"]["annotations"]["prefill.dev/ep-floor"].startswith("4@")
    assert "EP 2 to 4" in view.wait_event("EPEscalated")
    view.wait("only pods of 4 GPUs", lambda: expect(gpus_of(view) == ["4", "4"], gpus_of(view)), seconds=SLOW)
    view.wait_row(EP=4, GPUS=8, AVAILABLE="False", REASON="NotEnoughReady")
    view.change(engine={"args": None})
    view.wait_settled(2, seconds=SLOW)
    assert gpus_of(view) == ["4", "4"]
    view.wait_row(READY=2, UP_TO_DATE=2, EP=4, GPUS=8, REASON="AllReady")
    view.wait_condition("PlanFeasible", "True", "Escalated")


def test_reported_device_fault(start: Callable[..., PoolView], figure: Figure) -> None:
    """A GPU reported faulty under a running engine: replacement first, then drain; the node's other GPUs are left alone."""
    view = start(replicas=1, cpu={"pretendGPUs": True})
    view.wait_settled(2, seconds=SLOW)
    pod = view.ready()[0]
    number = int(pod["spec"]["nodeName"].removeprefix("node-"))
    held = view.cluster.held_devices(pod)
    with ReadyWatch(view) as watch:
        begin = time.monotonic()
        view.cluster.device_faults(number, [held[0]])
        try:
            gone = pod["metadata"]["uid"]
            uids = lambda: {item["metadata"]["uid"] for item in view.pods()}  # noqa: E731
            view.wait("the pod to be replaced", lambda: expect(gone not in uids(), "still there"), seconds=SLOW)
            figure(f"replaced after {time.monotonic() - begin:.0f} s, lowest ready count {watch.lowest}")
        finally:
            view.cluster.device_faults(number, [])
        assert watch.lowest >= 2
    assert pod["metadata"]["name"] in view.wait_event("PEReplaced")
    view.wait_settled(2, seconds=SLOW)
    view.wait_row(READY=2, UP_TO_DATE=2, REASON="AllReady")


@pytest.mark.parametrize(("mode", "spares"), [("Fixed", 1), ("None", 0)], ids=["spare", "no-spare"])
def test_kubectl_drain(start: Callable[..., PoolView], mode: str, spares: int, figure: Figure) -> None:
    """kubectl drain of a node ends by itself, never below N ready: at once with a spare, else when the engine has moved."""
    view = start(replicas=1, quota={"redundancy": {"mode": mode, "spares": spares or None}})
    view.wait_settled(1 + spares, seconds=SLOW)
    victim = view.ready()[0]["spec"]["nodeName"]
    with ReadyWatch(view) as watch:
        begin = time.monotonic()
        try:
            view.cluster.kubectl(
                "drain", victim, "--delete-emptydir-data", "--ignore-daemonsets", "--force", f"--timeout={SLOW}s"
            )
            figure(f"drained in {time.monotonic() - begin:.0f} s, lowest ready count {watch.lowest}")
            assert watch.lowest >= 1
        finally:
            view.cluster.kubectl("uncordon", victim)
    if not spares:
        view.wait_event("PEReplaced")
    view.wait_settled(1 + spares, seconds=SLOW)
    view.wait_row(READY=1 + spares, UP_TO_DATE=1 + spares, AVAILABLE="True", REDUNDANT="True", REASON="AllReady")


@pytest.mark.parametrize("how", ["stop", "crash"])
def test_node_lost(release: Release, start: Callable[..., PoolView], how: str, figure: Figure) -> None:
    """A node is lost (kubelet stopped, or all of it): engines are replaced elsewhere; it returns and nothing is doubled."""
    view = start(replicas=2, scheduling={"nodeSelector": None})
    cluster = view.cluster
    cluster.node(3)
    cluster.wait_node(3)
    view.wait_settled(3, seconds=SLOW)
    victim = view.ready()[-1]["spec"]["nodeName"]
    number = int(victim.removeprefix("node-"))
    lost = {pod["metadata"]["name"] for pod in view.live() if pod["spec"]["nodeName"] == victim}
    before = set(view.names())
    whole = ", every operator was on it" if {pod["spec"]["nodeName"] for pod in release.pods()} == {victim} else ""
    begin = time.monotonic()
    cluster.node(number, how)

    def replaced() -> None:
        fresh = [pod for pod in view.live() if pod["metadata"]["name"] not in before and pod["spec"].get("nodeName")]
        assert len(fresh) >= len(lost), f"{len(fresh)} of {len(lost)}"

    try:
        view.wait("bound replacements", replaced, seconds=SLOW)
        figure(f"replacement bound {time.monotonic() - begin:.0f} s after the loss (20 s of it until NotReady{whole})")
        until("the rest to be ready", lambda: expect(len(view.ready()) >= 3, len(view.ready())), seconds=SLOW)
        if not whole:  # else nobody led when the pods went
            assert victim in view.wait_event("NodeLost")
        view.wait_row(READY=3, UP_TO_DATE=3, AVAILABLE="True", REDUNDANT="True", REASON="AllReady")
    finally:
        cluster.node(number)
        cluster.wait_node(number)
    view.wait_settled(3, seconds=SLOW)
    assert not lost & set(view.names())


def test_operator_killed_in_mid_rollout(release: Release, start: Callable[..., PoolView], figure: Figure) -> None:
    """kill -9 of the leading operator in mid-rollout: led again within 20 s, the rollout is finished, never below N + S ready."""
    view = start(replicas=1)
    view.wait_settled(2, seconds=SLOW)
    old = set(view.names())
    with ReadyWatch(view) as watch:
        view.change(model={"revision": "r2"})
        view.wait("the first new pod", lambda: expect(set(view.names()) - old, view.names()))
        leader = release.leader()
        process = release.cluster.engine_processes(leader)[0]
        os.kill(process, signal.SIGKILL)
        begin, killed_at = time.monotonic(), datetime.now(UTC)
        # Its container starts again under the same name, and may lead under it: not the holder tells, but a later renewal.
        renewed = lambda: datetime.fromisoformat(release.lease()["renewTime"])  # noqa: E731
        until("a leader", lambda: expect(renewed() > killed_at, release.lease()), seconds=60)
        took = time.monotonic() - begin
        who = "itself, restarted" if release.lease_holder() == leader["metadata"]["name"] else "the other"
        figure(f"led again after {took:.1f} s, by {who}")
        assert took <= 20
        view.wait("only new pods", lambda: expect(not old & set(view.names()), view.names()), seconds=SLOW)
        view.wait_settled(2, seconds=SLOW)
        assert watch.lowest >= 2
    view.wait_row(READY=2, UP_TO_DATE=2, MODEL_REV="r2", REASON="AllReady")
    view.wait_event("RolloutComplete")

    def both_ready() -> None:
        pods = release.pods()
        assert [is_ready(pod) for pod in pods] == [True, True]
        (again,) = [pod for pod in pods if pod["metadata"]["name"] == leader["metadata"]["name"]]
        assert restarts(again) == restarts(leader) + 1, restarts(again)

    until("two operators, one of them restarted", both_ready, seconds=120)


def test_api_server_restart_under_engines(
    start: Callable[..., PoolView], checkpoint: Path, tmp_path: Path, figure: Figure
) -> None:
    """API server away for 15 s: engines go on serving, no pod is replaced, later changes are carried out."""
    view = start(replicas=1)
    view.wait_settled(2, seconds=SLOW)
    uids = {pod["metadata"]["uid"] for pod in view.live()}
    view.cluster.restart("kube-apiserver", down_seconds=15)

    def answering() -> Json:
        try:
            return view.get()
        except (ApiError, OSError) as error:
            raise AssertionError(str(error)) from error

    took = seconds_until("the API server", answering, limit=180)
    figure(f"API server back after {took:.0f} s more")
    view.wait_settled(2, seconds=SLOW)
    assert {pod["metadata"]["uid"] for pod in view.live()} == uids
    answers(view, checkpoint, tmp_path)


def test_operator_upgrade_rolls_no_engine(release: Release, start: Callable[..., PoolView], figure: Figure) -> None:
    """helm upgrade with other values: operator pods are new, engines keep their UIDs."""
    view = start(replicas=1)
    view.wait_settled(2, seconds=SLOW)
    uids = {pod["metadata"]["uid"] for pod in view.live()}
    before = {pod["metadata"]["uid"] for pod in release.pods()}
    begin = time.monotonic()
    release.install(podAnnotations={"test/upgraded": str(int(time.time()))})
    until(
        "new operators", lambda: expect(not before & {p["metadata"]["uid"] for p in release.pods()}, "old"), seconds=120
    )
    figure(f"upgraded in {time.monotonic() - begin:.0f} s")
    view.change(paused=True)
    view.wait_condition("Paused", "True")
    assert {pod["metadata"]["uid"] for pod in view.live()} == uids


def test_uninstall_keeps_pools(release: Release, start: Callable[..., PoolView]) -> None:
    """helm uninstall keeps CRDs, pools and engines; installed again, the operator finds everything as it was."""
    view = start(replicas=1)
    view.wait_settled(2, seconds=SLOW)
    uids = {pod["metadata"]["uid"] for pod in view.live()}
    release.uninstall()
    try:
        until("no operator pods", lambda: expect(release.pods() == [], len(release.pods())), seconds=60)
        assert conditions(release.cluster.api.get("customresourcedefinitions", None, "prefillpools.prefill.dev"))
        assert len(view.ready()) == 2
    finally:
        release.install()
    view.change(lifecycle={"maxConcurrentLoads": 3})
    view.wait_settled(2, seconds=SLOW)
    assert {pod["metadata"]["uid"] for pod in view.live()} == uids
