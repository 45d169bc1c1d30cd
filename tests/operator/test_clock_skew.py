"""An operator whose clock is not that of API server and kubelets: hours ahead or behind, no storm and no outage."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from prefill_operator.resources import PODS
from prefill_testing.cluster_model import ClusterModel, NodeModel
from prefill_testing.fake_api import FakeApi
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import OperatorRig, RigClock
from prefill_testing.planner_pools import make_pool, make_spec

SKEWS = pytest.mark.parametrize("skew", [-7200.0, -90.0, 90.0, 7200.0], ids=lambda skew: f"{skew:+.0f} s")
"""Of the operator's clock."""


async def _rig(skew: float, **spec: object) -> OperatorRig:
    clock = RigClock()
    api = FakeApi(clock=lambda: clock.now - skew)
    rig = await OperatorRig.start(api=api, clock=clock)
    rig.create_pool(spec)
    return rig


def _num_ready(rig: OperatorRig) -> int:
    pods = [pod for pod in rig.nodes.pods() if "deletionTimestamp" not in pod["metadata"]]
    return sum(
        any(item["type"] == "Ready" and item["status"] == "True" for item in pod["status"].get("conditions", []))
        for pod in pods
    )


async def _live(rig: OperatorRig, seconds: int, harm: Callable[[OperatorRig], None] = lambda _: None) -> int:
    """Lets time pass in steps of 2 s; the number of pods created meanwhile."""
    rig.api.requests.clear()
    for _ in range(seconds // 2):
        await rig.settle()
        rig.nodes.step()
        harm(rig)
        await rig.advance(2.0)
    return sum(request.verb == "create" and request.resource == PODS.plural for request in rig.api.requests)


def _refuse_admission(rig: OperatorRig) -> None:
    """As a kubelet whose devices are gone: every pod that is bound fails."""
    for pod in rig.nodes.pods():
        if pod["spec"].get("nodeName") and pod["status"]["phase"] != "Failed":
            rig.nodes.change_pod(pod["metadata"]["name"], {"phase": "Failed", "reason": "UnexpectedAdmissionError"})


@SKEWS
@in_loop
async def test_rollout_and_scale_down_keep_their_promises(skew: float) -> None:
    rig = await _rig(skew)
    await _live(rig, 20)
    assert rig.condition("Ready")["status"] == "True"
    rig.change_spec(engine={"image": "engine:2"})
    fewest = 9

    def watch(rig: OperatorRig) -> None:
        nonlocal fewest
        fewest = min(fewest, _num_ready(rig))

    assert await _live(rig, 60, watch) == 3
    rig.change_spec(engine={"image": "engine:2"}, replicas=1)
    await _live(rig, 20)

    assert fewest >= 2
    assert {pod["spec"]["containers"][0]["image"] for pod in rig.nodes.pods()} == {"engine:2"}
    assert (len(rig.names()), rig.condition("Ready")["status"]) == (2, "True")


@SKEWS
@in_loop
async def test_refused_pods_make_no_storm(skew: float) -> None:
    """Pauses of 10, 20, 40 .. s between attempts, of as many pods as are missing."""
    rig = await _rig(skew, replicas=1, quota={"redundancy": {"mode": "None"}})

    assert await _live(rig, 300, _refuse_admission) <= 6


@pytest.mark.parametrize("exit_code", [1, 12, 14], ids=["crash", "out of memory", "GPU fault"])
@SKEWS
def test_failing_engines_make_no_storm(skew: float, exit_code: int) -> None:
    """No engine ever comes up. Without skew an hour takes 6, 6 and 24 pods."""
    nodes = {f"gpu-{index}": NodeModel() for index in range(4)}
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=2)), nodes=nodes, load_seconds=20)
    cluster.failing_exit, cluster.oom_below_ep = (None, 16) if exit_code == 12 else (exit_code, 0)
    for _ in range(720):
        cluster.run_pass(replace(cluster.observe(), now=cluster.now + skew))
        cluster.advance(5)

    assert 2 <= sum(line.startswith("create") for line in cluster.story()) <= 24
    assert cluster.condition("Available").status == "False"
