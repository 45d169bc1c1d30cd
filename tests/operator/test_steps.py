"""`prefill-operator steps`: the sequence a user sees before anything happens."""

from prefill_operator.api import Pool
from prefill_operator.api_parts import LifecycleSpec, RolloutSpec
from prefill_operator.plan import PoolPlan, plan_pool
from prefill_operator.steps import StepTimes, creation_steps, format_steps, rollout_steps
from prefill_plan.model_spec import released_model_spec
from prefill_testing.planner_pools import make_pool, make_spec, make_ve_spec

TIMES = StepTimes(load_seconds=100, drain_seconds=10)


def planned(**changes: object) -> tuple[Pool, PoolPlan]:
    pool = make_pool(make_spec(**changes))
    return pool, plan_pool(pool, floor=None, nodes=None, model=released_model_spec())


def test_creation_steps_follow_the_load_cap() -> None:
    pool, plan = planned(replicas=3, spares=1, lifecycle=LifecycleSpec(max_concurrent_loads=2))
    steps = creation_steps(pool, plan, times=TIMES)
    assert [(step.at, len(step.actions), step.ready, step.total) for step in steps] == [(0, 2, 0, 2), (100, 2, 2, 4)]


def test_rollout_steps_show_the_whole_sequence() -> None:
    pool, plan = planned(replicas=2, rollout=RolloutSpec(min_ready_seconds=30))
    steps = rollout_steps(pool, plan, old_ep=None, times=TIMES)
    new = f"flash-{plan.revision}"
    assert [(step.at, step.actions) for step in steps] == [
        (0, (f"create {new}-3",)),
        (130, ("drain flash-00000000-1 (OldRevision)",)),
        (140, (f"create {new}-4", "delete flash-00000000-1 (Drained)")),
        (270, ("drain flash-00000000-2 (OldRevision)",)),
        (280, ("delete flash-00000000-2 (Drained)",)),
        (280, (f"event RolloutComplete: all PEs run revision {plan.revision}",)),
    ]
    assert min(step.ready for step in steps) == 2


def test_rollout_steps_from_another_ep_replace_every_pod() -> None:
    pool, plan = planned(replicas=3)
    steps = rollout_steps(pool, plan, old_ep=4, times=TIMES)
    drained = [action for step in steps for action in step.actions if action.startswith("drain flash-00000000")]
    assert len(drained) == 3
    assert steps[-1].ready == 3


def test_rollout_steps_of_an_encoder_pool() -> None:
    pool = make_pool(make_ve_spec(replicas=1))
    plan = plan_pool(pool, floor=None, nodes=None, model=released_model_spec())
    assert rollout_steps(pool, plan, old_ep=None, times=TIMES)[-1].ready == 2


def test_format_steps_gives_one_line_per_action() -> None:
    pool, plan = planned(replicas=2)
    lines = format_steps(creation_steps(pool, plan, times=TIMES)).splitlines()
    assert lines[0].split() == ["time", "ready", "pods", "action"]
    assert lines[1].split() == ["0s", "0", "2", "create", f"flash-{plan.revision}-1"]
    assert lines[2].split() == ["create", f"flash-{plan.revision}-2"]
