"""Figures at scale on the real API server, 20 fake nodes (C33, but of 1,024 GPUs: 4,000 PEs of EP 4 need 16,000)."""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prefill_bed.api import Json, is_ready
from prefill_bed.bed import Bed, Child, FakeNodes, cpu_seconds
from prefill_bed.cluster import CONTROL_PLANE, Cluster, Profile
from prefill_bed.goals import Goals
from prefill_bed.installation import Helm, LocalOperators, merged
from prefill_bed.pools import PoolView, ReadyWatch, expect, gpu_pool, wait_all
from prefill_bed.waiting import until

pytestmark = pytest.mark.scale
Figure = Callable[[str], None]
PODS = 4
QUIET: Json = {"scope": {"namespaced": False}, "security": {"allowedHostPathPrefixes": ["/models"]}}


@pytest.fixture
def goals(figure: Figure) -> Goals:
    """Figures with goals; a case ends with goals.check()."""
    return Goals(figure)


@pytest.fixture
def cluster(bed: Bed) -> Cluster:
    """Rate limits of scheduler and controllers lifted, as in the peer's best run."""
    profile = Profile(nodes=0, grace_seconds=6, audit=True, scheduler_qps=500)
    cluster = bed.use(profile, FakeNodes(count=20, gpus=1024, heartbeat=5))
    bed.fakes.reset()
    bed.fakes.control(ready_seconds=1)
    return cluster


@pytest.fixture
def operators(
    cluster: Cluster, helm: Callable[[Cluster], Helm], new_namespace: Callable[[Cluster], str]
) -> Iterator[LocalOperators]:
    """Cluster-wide, with the chart's defaults."""
    made = LocalOperators(cluster, helm(cluster), new_namespace(cluster), QUIET)
    yield made
    made.end()


def pool(name: str) -> Json:
    rollout = {"minReadySeconds": 0}
    return gpu_pool(name, replicas=PODS, quota={"redundancy": {"mode": "None", "spares": None}}, rollout=rollout)


def create_pools(cluster: Cluster, namespace: str, count: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        names = [f"p{index}" for index in range(count)]
        list(threads.map(lambda name: cluster.api.create("prefillpools", namespace, pool(name)), names))


def quantile(text: str, name: str, share: float) -> float:
    """Upper bound of the bucket in which this share of a histogram lies, over all labels."""
    buckets: dict[float, float] = {}
    for bound, count in re.findall(rf'^{name}_bucket{{[^}}]*le="([^"]+)"[^}}]*}} ([0-9.e+]+)$', text, re.MULTILINE):
        buckets[float(bound)] = buckets.get(float(bound), 0) + float(count)
    total = max(buckets.values())
    return min(bound for bound, count in buckets.items() if count >= share * total)


def fill(cluster: Cluster, operators: LocalOperators, namespace: str, goals: Goals, label: str) -> None:
    """Creates 100 pools and waits for them: the time, and the CPU time of every process that had a part in it."""
    until("the pods of the case before to be gone", lambda: expect(not cluster.api.list("pods"), "pods"), seconds=300)
    processes = {name: cluster.process_id(name) for name in CONTROL_PLANE}
    processes |= {"operator": operators.children["op-a"].process.pid, "this bench": os.getpid()}
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    begin = time.monotonic()
    create_pools(cluster, namespace, 100)
    wait_all(cluster, "prefillpools", namespace, "Ready", 100, seconds=120)
    took = time.monotonic() - begin
    used = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    goals.less(f"{label}: all Ready after", took, 10, "s")
    goals.less(f"{label}: CPU operator + API server", used["operator"] + used["kube-apiserver"], 12, "s")
    goals.note(f"{label}: CPU seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in used.items()))


def test_hundred_pools_without_gates(
    cluster: Cluster, helm: Callable[[Cluster], Helm], new_namespace: Callable[[Cluster], str], goals: Goals
) -> None:
    """As the peer runs, which has no readiness gates: one write of the operator and one of the kubelet less for each pod."""
    values = merged(QUIET, {"readinessGate": {"enabled": False}, "settings": {"workers": 12}})
    operators = LocalOperators(cluster, helm(cluster), new_namespace(cluster), values)
    namespace = new_namespace(cluster)
    try:
        operators.start()
        fill(cluster, operators, namespace, goals, "100 pools without readiness gates")
    finally:
        operators.end()
    goals.check()


def test_hundred_pools(
    cluster: Cluster, operators: LocalOperators, new_namespace: Callable[[Cluster], str], goals: Goals
) -> None:
    """100 pools of 4: all Ready, CPU of operator and API server, restart without a write, replacement, rollout."""
    child, namespace = operators.start(), new_namespace(cluster)
    fill(cluster, operators, namespace, goals, "100 pools")

    child.end(signal.SIGTERM)
    since = cluster.audit_size()
    begin = time.monotonic()
    operators.start("op-b")
    _wait_reconciled(operators, "op-b", 100)
    writes = cluster.writes(operators.user, since=since)
    goals.note(f"restart: {time.monotonic() - begin:.1f} s until all were looked at")
    goals.none("writes after a restart", writes)

    view = PoolView(cluster, namespace, "p7")
    old = set(view.names())
    begin = time.monotonic()
    cluster.api.delete("pods", namespace, min(old))
    view.wait("4 ready", lambda: expect(len(view.ready()) == PODS and min(old) not in view.names(), view.names()))
    goals.less("deleted pod replaced and ready after", time.monotonic() - begin, 2.5, "s")

    view, old = PoolView(cluster, namespace, "p8"), set(PoolView(cluster, namespace, "p8").names())
    with ReadyWatch(view) as watch:
        begin = time.monotonic()
        view.change(model={"revision": "r2"})
        view.wait("new pods", lambda: expect(not old & {p["metadata"]["name"] for p in view.pods()}, view.names()))
        view.wait_condition("Ready", "True")
        goals.less("4 pods rolled in", time.monotonic() - begin, 17, "s")
        goals.note(f"lowest ready count {watch.lowest}")
        assert watch.lowest >= PODS
    goals.check()


def _wait_reconciled(operators: LocalOperators, name: str, count: int) -> None:
    def check() -> None:
        done = operators.metric(name, "prefill_operator_reconcile_seconds_count")
        assert done >= count, f"{done:.0f} of {count} reconciled"

    until("every pool to be reconciled", check, seconds=180)


def _cpu_share(child: Child, *, seconds: float) -> float:
    """Of one core, over the next seconds."""
    before = child.cpu_seconds()
    time.sleep(seconds)
    return (child.cpu_seconds() - before) / seconds


def _measure_rest(child: Child, find_writes: Callable[[], list[Json]], goals: Goals) -> None:
    # Its watches repeat every object once, after the first pass over all pools.
    until("start-up to end", lambda: expect(_cpu_share(child, seconds=5) < 0.3, "still busy"), seconds=120)
    before, begin = child.cpu_seconds(), time.monotonic()
    time.sleep(75)  # a stretch with at least one resync: idle load is a rate over time
    idle = (child.cpu_seconds() - before) / (time.monotonic() - begin)
    goals.less("idle CPU", 100 * idle, 5, "%")
    goals.less("RSS", child.resident_bytes() / 2**20, 400, "MiB")
    goals.none("writes at rest", find_writes())


@pytest.mark.timeout(3600)
def test_thousand_pools(
    cluster: Cluster, operators: LocalOperators, bed: Bed, new_namespace: Callable[[Cluster], str], goals: Goals
) -> None:
    """1,000 pools of 4: restart < 30 s, RSS < 400 MiB, idle CPU < 5 %, no write at rest, node loss < 25 s, takeover < 20 s."""
    child, namespace = operators.start(), new_namespace(cluster)
    begin = time.monotonic()
    create_pools(cluster, namespace, 1000)
    wait_all(cluster, "prefillpools", namespace, "Ready", 1000, seconds=900)
    goals.note(f"4,000 pods Ready in {time.monotonic() - begin:.0f} s")
    child.end(signal.SIGTERM)

    since, begin = cluster.audit_size(), time.monotonic()
    child = operators.start("op-b")
    _wait_reconciled(operators, "op-b", 1000)
    goals.less("restart: all reconciled after", time.monotonic() - begin, 30, "s")
    slow = quantile(operators.metrics("op-b"), "prefill_operator_reconcile_seconds", 0.99)
    goals.note(f"reconcile p99 <= {slow:g} s")

    _measure_rest(child, lambda: cluster.writes(operators.user, since=since), goals)

    nodes = {p["metadata"]["uid"]: p["spec"]["nodeName"] for p in cluster.api.list("pods", namespace)}
    (fullest, num_lost), *_ = Counter(nodes.values()).most_common(1)
    begin = time.monotonic()
    bed.fakes.kill_nodes(fullest)

    def replaced() -> None:
        pods = cluster.api.list("pods", namespace)
        fresh = sum(p["metadata"]["uid"] not in nodes and bool(p["spec"].get("nodeName")) for p in pods)
        assert fresh >= num_lost, f"{fresh} of {num_lost}"

    until("replacements", replaced, seconds=180, interval=0.5)
    goals.less(f"node with {num_lost} pods lost: all replacements bound after", time.monotonic() - begin, 25, "s")
    bed.fakes.kill_nodes()
    wait_all(cluster, "prefillpools", namespace, "Ready", 1000, seconds=300)

    operators.start_standby("op-c")
    child.end(signal.SIGKILL)
    begin = time.monotonic()
    until("op-c to lead", lambda: operators.leads("op-c"), seconds=60)
    goals.less("leader killed: Lease taken after", time.monotonic() - begin, 20, "s")
    view = PoolView(cluster, namespace, "p500")
    view.change(replicas=PODS + 1)
    view.wait("a fifth pod", lambda: expect(sum(map(is_ready, view.pods())) == PODS + 1, len(view.pods())), seconds=120)
    goals.note(f"a change carried out {time.monotonic() - begin:.1f} s after it")
    goals.check()
