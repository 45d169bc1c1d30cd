"""100 pools beside a peer on the same bed, in turns in one run: ratios hold where seconds of a shared machine do not."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prefill_bed.api import Json
from prefill_bed.bed import Bed, FakeNodes, cpu_seconds
from prefill_bed.cluster import CONTROL_PLANE, Cluster, Profile
from prefill_bed.installation import Helm, LocalOperators
from prefill_bed.peer import PeerController, group_set, source_of_peer
from prefill_bed.pools import expect, gpu_pool, wait_all
from prefill_bed.waiting import until

pytestmark = pytest.mark.peer
Figure = Callable[[str], None]
COUNT, PODS, TURNS = 100, 4, 3
VALUES: Json = {
    "scope": {"namespaced": False},
    "security": {"allowedHostPathPrefixes": ["/models"]},
    "readinessGate": {"enabled": False},
}
"""Without readiness gates, which the peer does not have."""


@pytest.fixture
def cluster(bed: Bed) -> Iterator[Cluster]:
    """As test_scale_pools.py has it, but without the audit log; taken down in the end, for the peer's webhooks fail closed."""
    cluster = bed.use(Profile(nodes=0, grace_seconds=6, scheduler_qps=500), FakeNodes(count=20, gpus=512, heartbeat=5))
    bed.fakes.reset()
    bed.fakes.control(ready_seconds=1)
    yield cluster
    bed.end()


def pool(name: str) -> Json:
    redundancy = {"mode": "None", "spares": None}
    return gpu_pool(name, replicas=PODS, quota={"redundancy": redundancy}, rollout={"minReadySeconds": 0})


def fill(cluster: Cluster, pid: int, resource: str, make: Callable[[str], Json], condition: str) -> tuple[float, ...]:
    """Creates COUNT objects and waits; then deletes them. (seconds until ready, its own CPU, the API server's, the rest's)."""
    rest = [cluster.process_id(name) for name in CONTROL_PLANE[1:]]
    watched = [[pid], [cluster.process_id("kube-apiserver")], rest]
    before = [sum(map(cpu_seconds, pids)) for pids in watched]
    begin, names = time.monotonic(), [f"p{index}" for index in range(COUNT)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: cluster.api.create(resource, "default", make(name)), names))
    wait_all(cluster, resource, "default", condition, COUNT, seconds=300)
    took = time.monotonic() - begin
    used = [sum(map(cpu_seconds, pids)) - first for pids, first in zip(watched, before, strict=True)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: cluster.api.delete(resource, "default", name), names))
    until("the pods to be gone", lambda: expect(not cluster.api.list("pods"), "pods"), seconds=300, interval=2)
    return (took, *used)


@pytest.mark.timeout(3600)
def test_hundred_beside_leader_worker_set(
    cluster: Cluster, helm: Callable[[Cluster], Helm], new_namespace: Callable[[Cluster], str], figure: Figure
) -> None:
    """100 × 4 pods until all are Ready, the peer and ours in turns."""
    peer = PeerController(cluster, source_of_peer())
    operators = LocalOperators(cluster, helm(cluster), new_namespace(cluster), VALUES)
    ours: list[tuple[float, ...]] = []
    theirs: list[tuple[float, ...]] = []
    try:
        own = operators.start().process.pid
        for _ in range(TURNS):
            sets = fill(cluster, peer.child.process.pid, "leaderworkersets", lambda n: group_set(n, PODS), "Available")
            theirs.append(sets)
            ours.append(fill(cluster, own, "prefillpools", pool, "Ready"))
    finally:
        operators.end()
        peer.end()
    for name, turns in (("LeaderWorkerSet", theirs), ("ours", ours)):
        for took, used, server, rest in turns:
            figure(f"{name}: Ready in {took:.1f} s, CPU own {used:.1f} + API server {server:.1f} s, rest {rest:.1f} s")
    ratio = statistics.median(o[0] / t[0] for o, t in zip(ours, theirs, strict=True))
    work = statistics.median((o[1] + o[2]) / (t[1] + t[2]) for o, t in zip(ours, theirs, strict=True))
    figure(f"ours / peer, median of {TURNS} turns: time {ratio:.2f}, CPU of controller + API server {work:.2f}")
    figure(f"load average after it: {os.getloadavg()[0]:.1f}")
