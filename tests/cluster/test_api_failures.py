"""What breaks and what the operator makes of it, on fake nodes (k8s.md 7.3 items 4, 7 and 8, and 4.6)."""

import json
import time
from collections.abc import Callable

import pytest
from prefill_bed.api import Json, conditions, is_ready
from prefill_bed.bed import Bed
from prefill_bed.cluster import Cluster
from prefill_bed.fake_kubelet import Rule
from prefill_bed.installation import LocalOperators
from prefill_bed.pools import PoolView, ReadyWatch, expect, gpu_pool

Install = Callable[..., LocalOperators]
Figure = Callable[[str], None]


@pytest.fixture
def start(install: Install, control_plane: Cluster) -> Callable[..., PoolView]:
    """An operator and a pool that need not become ready; keywords are fields of its spec."""

    def make(**spec: object) -> PoolView:
        operators = install()
        operators.start()
        view = PoolView(control_plane, operators.namespace, operators=operators)
        view.create(gpu_pool(**spec))
        return view

    return make


def nodes_of(pods: list[Json]) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in pods}


def gpus_of(view: PoolView) -> list[str]:
    return sorted(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in view.live())


def pods_created(view: PoolView, since: int) -> int:
    """By the pool's operator, from this place of the audit log on."""
    writes = view.cluster.writes(view.installation.user, since=since)
    return sum(write["verb"] == "create" and write["objectRef"]["resource"] == "pods" for write in writes)


@pytest.mark.sees_nodes
def test_node_loss(start: Callable[..., PoolView], bed: Bed, figure: Figure) -> None:
    """A dead node: its pods have bound replacements within 25 s; when it returns the old pods vanish, without duplicates."""
    view = start()
    view.wait_settled(4)
    victim = view.live()[0]["spec"]["nodeName"]
    lost = {pod["metadata"]["name"] for pod in view.live() if pod["spec"]["nodeName"] == victim}
    before = {pod["metadata"]["name"] for pod in view.live()}
    begin = time.monotonic()
    bed.fakes.kill_nodes(victim)

    def replaced() -> None:
        fresh = [pod for pod in view.live() if pod["metadata"]["name"] not in before and pod["spec"].get("nodeName")]
        assert len(fresh) >= len(lost), f"{len(fresh)} of {len(lost)} replaced"

    view.wait("bound replacements", replaced, seconds=60)
    took = time.monotonic() - begin
    figure(f"{len(lost)} replacements bound {took:.1f} s after the node's last word")
    assert took < 25
    bed.fakes.kill_nodes()
    view.wait_settled(4)
    assert not lost & set(view.names())
    assert any(event["reason"] == "NodeLost" for event in view.events())


def test_out_of_memory_raises_ep(start: Callable[..., PoolView], bed: Bed, figure: Figure) -> None:
    """CUDA out of memory on two nodes: EP 4 becomes 8, the pool carries the floor; a new model revision voids it."""
    end = json.dumps(
        {"v": 1, "code": "CudaOom", "exit": 12, "phase": "warmup", "planHash": "$PLAN_HASH", "foreignBytes": 0}
    )
    bed.fakes.rules(Rule(exit=12, message=end, times=50, back_off=1))
    view = start(scheduling={"placement": "SpreadRequired"}, replicas=2, quota={"redundancy": {"mode": "None"}})
    begin = time.monotonic()
    view.wait_condition("PlanFeasible", "True", "Escalated", seconds=120)
    figure(f"EP 8 after {time.monotonic() - begin:.1f} s")
    bed.fakes.rules()
    view.wait("only pods of 8 GPUs", lambda: expect(gpus_of(view) == ["8", "8"], gpus_of(view)), seconds=120)
    view.wait_condition("Ready", "True")
    annotations = view.get()["metadata"]["annotations"]
    assert annotations["prefill.dev/ep-floor"].startswith("8@")
    assert view.status()["plan"]["source"] == "Escalated"
    view.change(model={"revision": "r2"})
    view.wait_condition("PlanFeasible", "True", "MinimumEP", seconds=60)
    view.wait("pods of 4 GPUs again", lambda: expect(gpus_of(view) == ["4", "4"], gpus_of(view)), seconds=180)


def test_killed_by_host_memory_is_no_evidence(start: Callable[..., PoolView], bed: Bed) -> None:
    """OOMKilled, as 137 or as 16, is a crash about host memory: EP stays 4."""
    bed.fakes.rules(Rule(exit=137, reason="OOMKilled", times=1), Rule(exit=16, reason="OOMKilled", times=1))
    view = start()
    view.wait_settled(4)
    assert gpus_of(view) == ["4"] * 4
    assert "prefill.dev/ep-floor" not in view.get()["metadata"].get("annotations", {})
    assert all(pod["status"]["containerStatuses"][0]["restartCount"] == 2 for pod in view.live())


def test_failed_pod_storm(start: Callable[..., PoolView], bed: Bed, figure: Figure) -> None:
    """Devices lost on every node: Failed pods are deleted, creation backs off, the pool says why; it recovers by itself."""
    bed.fakes.rules(Rule(fail="UnexpectedAdmissionError"))
    since = bed.cluster.audit_size()
    view = start(replicas=1, quota={"redundancy": {"mode": "None"}})

    def count() -> int:
        return pods_created(view, since)

    view.wait("the fourth attempt", lambda: expect(count() >= 4, count()), seconds=120)
    assert len(view.pods()) <= 2
    # The pause of 2 s doubles each time: the fifth attempt comes 16 s after the fourth, the sixth 32 s later.
    begin = time.monotonic()
    view.wait("the fifth attempt", lambda: expect(count() >= 5, count()), seconds=60)
    figure(f"5th pod {time.monotonic() - begin:.0f} s after the 4th")
    assert time.monotonic() - begin > 12
    assert count() == 5
    bed.fakes.rules()
    view.wait_settled(1, seconds=120)


def test_one_bad_node_is_avoided(start: Callable[..., PoolView], bed: Bed) -> None:
    """A node that refuses admission twice is avoided; the pool becomes Ready elsewhere."""
    bed.fakes.rules(Rule(fail="UnexpectedAdmissionError", nodes=["gpu-0", "gpu-1"]))
    view = start()
    view.wait_settled(4, seconds=180)
    assert not {"gpu-0", "gpu-1"} & nodes_of(view.live())


def test_config_rejected_is_not_retried(start: Callable[..., PoolView], bed: Bed) -> None:
    """Exit 10: Stalled with the engine's own sentence, no new pods; a corrected spec goes through."""
    end = json.dumps(
        {"v": 1, "code": "ConfigError", "exit": 10, "phase": "start", "detail": "keep_tokens must be at least 134"}
    )
    bed.fakes.rules(Rule(exit=10, message=end, times=50, back_off=30))
    view = start()
    found = view.wait_condition("Stalled", "True", "ConfigRejected")
    assert "keep_tokens must be at least 134" in found["message"]
    before = view.names()
    assert len(before) == 4
    bed.fakes.rules()
    view.change(model={"revision": "r2"})
    view.wait_settled(4, seconds=180)
    view.wait_condition("Stalled", "False")


def test_image_pull_failure_is_not_retried(install: Install, control_plane: Cluster, bed: Bed) -> None:
    """An image that cannot be pulled: ImagePullFailed in the kubelet's word; five more passes make no pod; another heals it."""
    bed.fakes.rules(Rule(image="ImagePullBackOff"))
    operators = install(settings={"times": {"imagePullSeconds": 5}})
    operators.start()
    since = bed.cluster.audit_size()
    view = PoolView(control_plane, operators.namespace, operators=operators)
    view.create(gpu_pool())
    found = view.wait_condition("Stalled", "True", "ImagePullFailed")
    assert "ImagePullBackOff" in found["message"]
    uids = {pod["metadata"]["uid"] for pod in view.pods()}
    passes = lambda: operators.metric("op-a", "prefill_operator_reconcile_seconds_count")  # noqa: E731
    for number in range(5):
        before, note = passes(), {"metadata": {"annotations": {"test/number": str(number)}}}
        bed.cluster.api.patch("prefillpools", view.namespace, view.name, note)
        view.wait("another pass", lambda before=before: expect(passes() > before, before))
    assert {pod["metadata"]["uid"] for pod in view.pods()} == uids
    assert pods_created(view, since) == len(uids) == 4
    bed.fakes.rules()
    view.change(engine={"image": "registry.example/engine:2"})
    view.wait_settled(4, seconds=180)
    view.wait_condition("Stalled", "False")


@pytest.mark.sees_nodes
def test_gpu_fault_on_the_node(start: Callable[..., PoolView], bed: Bed, figure: Figure) -> None:
    """A GPU fault reported on a node: its pods are replaced first, then drained; never below 4 ready."""
    view = start()
    view.wait_settled(4)
    victim = view.live()[0]["spec"]["nodeName"]
    with ReadyWatch(view) as watch:
        fault = {"metadata": {"annotations": {"prefill.dev/xid": "94"}}}
        bed.cluster.api.patch("nodes", None, victim, fault)
        try:
            view.wait("the node to be left", lambda: expect(victim not in nodes_of(view.pods()), nodes_of(view.pods())))
            view.wait_settled(4)
        finally:
            bed.cluster.api.patch("nodes", None, victim, {"metadata": {"annotations": {"prefill.dev/xid": None}}})
        figure(f"lowest ready count {watch.lowest}")
        assert watch.lowest >= 4


@pytest.mark.sees_nodes
def test_cordon_moves_pods_first(start: Callable[..., PoolView], bed: Bed) -> None:
    """A cordoned node: replacements become ready elsewhere before its pods drain, so kubectl drain finds nothing to wait for."""
    view = start()
    view.wait_settled(4)
    victim = view.live()[0]["spec"]["nodeName"]
    with ReadyWatch(view) as watch:
        bed.cluster.kubectl("cordon", victim)
        try:
            view.wait("the node to be left", lambda: expect(victim not in nodes_of(view.pods()), nodes_of(view.pods())))
            view.wait_settled(4)
            bed.cluster.kubectl(
                "drain", victim, "--delete-emptydir-data", "--force", "--ignore-daemonsets", "--timeout=60s"
            )
        finally:
            bed.cluster.kubectl("uncordon", victim)
        assert watch.lowest >= 4


def test_no_room_says_so(start: Callable[..., PoolView], bed: Bed) -> None:
    """More PEs than GPUs: the ready ones serve, the pool carries the scheduler's words, scaling down frees the pending first."""
    view = start(replicas=9)
    view.wait("8 ready pods", lambda: expect(sum(map(is_ready, view.pods())) == 8, len(view.ready())))

    def said() -> None:
        found = view.condition("Available")
        words = ("8/9 ready", "nodes are available", "Insufficient nvidia.com/gpu")
        assert found["status"] == "False", found
        assert all(word in found["message"] for word in words), found["message"]

    view.wait("the scheduler's words in Available", said)
    ready = {pod["metadata"]["name"] for pod in view.ready()}
    view.change(replicas=7)
    view.wait_settled(8)
    assert set(view.names()) == ready


def test_quota_refusal_is_a_condition(start: Callable[..., PoolView], bed: Bed) -> None:
    """A ResourceQuota that refuses pods: QuotaExceeded with the API server's words, and no storm; lifting it is enough."""
    view = start(replicas=0)
    view.wait_condition("Available", "True", "ScaledToZero")
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    bed.cluster.api.create("resourcequotas", view.namespace, quota)
    view.wait(
        "the quota to count",
        lambda: expect(bed.cluster.api.get("resourcequotas", view.namespace, "few").get("status"), ""),
    )
    view.change(replicas=3)
    found = view.wait_condition("Progressing", "False", "QuotaExceeded")
    assert "exceeded quota" in found["message"]
    assert conditions(view.get())["Available"]["status"] == "False"
    bed.cluster.api.delete("resourcequotas", view.namespace, "few")
    view.wait_settled(4)
