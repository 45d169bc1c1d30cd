"""N, S and W of a pool of which no pod exists yet."""

from prefill_operator.api import Pool
from prefill_operator.fleet import Fleet
from prefill_operator.intent import read_intent
from prefill_operator.ledger import Ledger
from prefill_operator.model import OperatorTimes
from prefill_operator.plan import PoolPlan
from prefill_operator.targets import Targets, plan_targets


def offline_targets(pool: Pool, plan: PoolPlan) -> Targets:
    return plan_targets(read_intent(pool), plan, Fleet(views=(), wakeup=None), Ledger(), OperatorTimes())
