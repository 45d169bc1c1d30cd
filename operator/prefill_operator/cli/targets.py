"""N, S and W of a pool of which no pod exists yet."""

from dataclasses import replace

import msgspec

from prefill_operator.api import Pool
from prefill_operator.api_parts import Actuator
from prefill_operator.fleet import Fleet
from prefill_operator.intent import read_intent
from prefill_operator.ledger import Ledger
from prefill_operator.model import OperatorTimes
from prefill_operator.plan import PoolPlan
from prefill_operator.targets import Targets, plan_targets


def offline_targets(pool: Pool, plan: PoolPlan) -> Targets:
    return plan_targets(read_intent(pool), plan, Fleet(views=(), wakeup=None), Ledger(), OperatorTimes())


def offline_sizes(pool: Pool) -> tuple[Pool, ...]:
    """The pool as its spec says or, where an autoscaler will set its replicas, with the fewest and with the most."""
    autoscaling = pool.spec.autoscaling
    if autoscaling is None or autoscaling.actuator is Actuator.EXTERNAL:
        return (pool,)
    counts = dict.fromkeys((autoscaling.min_replicas, autoscaling.max_replicas))
    return tuple(replace(pool, spec=msgspec.structs.replace(pool.spec, replicas=count)) for count in counts)
