"""What holds in every rollout, whatever the numbers (k8s.md 7.1 layer 1)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_operator.api_parts import LifecycleSpec
from prefill_operator.model import OperatorTimes
from prefill_operator.pool_api import ExpertParallelSpec, QuotaSpec, RedundancySpec
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import ENGINE_B, make_pool, make_spec


@settings(max_examples=80, deadline=None)
@given(
    replicas=st.integers(0, 8),
    spares=st.integers(0, 2),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 3),
    load_cap=st.sampled_from([0, 1, 3]),
    drains=st.sampled_from([0, 1, 2]),
    target=st.integers(0, 8),
    scale_after=st.integers(0, 6),
)
def test_rollout_keeps_its_promises_for_all_numbers(
    replicas: int, spares: int, surge: int, unavailable: int, load_cap: int, drains: int, target: int, scale_after: int
) -> None:
    """Never below W - maxUnavailable, never above W + maxSurge, load cap, no deadlock, and scaling never rolls."""
    if surge == unavailable == 0:
        surge = 1
    lifecycle = LifecycleSpec(max_concurrent_loads=load_cap, max_concurrent_drains=drains)
    spec = make_spec(replicas=replicas, spares=spares, surge=surge, unavailable=unavailable, lifecycle=lifecycle)
    cluster = settled_cluster(make_pool(spec))
    cluster.edit(engine=ENGINE_B)
    before, revision = len(cluster.log), cluster.plan().revision
    totals = [number + (spares if number else 0) for number in (replicas, target)]
    times = OperatorTimes()
    for number in range(400):
        if number == scale_after:
            cluster.edit(replicas=target)
        decision = cluster.run_pass(times=times)
        live = [pod for pod in cluster.pods.values() if pod.terminating_since is None]
        assert len(live) <= max(totals) + surge
        loading = [pod for pod in live if not pod.ready and pod.draining_since is None]
        assert not load_cap or len(loading) <= load_cap
        if number > scale_after and not decision.actions and cluster.next_change() is None:
            break
        cluster.advance(7.0)
    floor = min(totals) - unavailable
    assert min((applied.serving for applied in cluster.log[before:]), default=floor) >= floor
    assert cluster.plan().revision == revision
    assert cluster.num_serving == len(cluster.pods) == totals[1]
    assert {pod.revision for pod in cluster.pods.values()} <= {revision}
    assert cluster.run_pass(times=times).actions == ()


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.integers(1, 4),
    spares=st.integers(0, 2),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 2),
    max_gpus=st.integers(4, 40),
    sizes=st.lists(st.sampled_from([2, 4, 8]), min_size=2, max_size=3),
    passes=st.integers(1, 12),
)
def test_gpu_quota_holds_through_every_change_of_size(
    replicas: int, spares: int, surge: int, unavailable: int, max_gpus: int, sizes: list[int], passes: int
) -> None:
    """k8s.md 7.1 layer 2: never more than quota, with pods of two sizes and edits in mid-rollout; and no endless churn."""
    quota = QuotaSpec(max_gpus=max_gpus, redundancy=RedundancySpec(spares=spares))
    unavailable = max(unavailable, int(surge == 0))
    spec = make_spec(replicas=replicas, surge=surge, unavailable=unavailable, quota=quota)
    cluster = ClusterModel(pool=make_pool(spec), nodes={f"gpu-{index}": NodeModel() for index in range(6)})
    for size in sizes:
        cluster.edit(expert_parallel=ExpertParallelSpec(size=size))
        for _ in range(passes):
            cluster.run_pass()
            assert sum(pod.gpus for pod in cluster.holders) <= max_gpus
            cluster.advance(40.0)
    for _ in range(80):
        cluster.run_pass()
        assert sum(pod.gpus for pod in cluster.holders) <= max_gpus
        cluster.advance(60.0)
    before = len(cluster.log)
    for _ in range(10):
        cluster.run_pass()
        cluster.advance(60.0)
    assert cluster.story(since=before) == []
