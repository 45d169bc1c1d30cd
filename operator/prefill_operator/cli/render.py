"""`prefill-operator render`: every object that the operator would make for a pool, as YAML for `kubectl apply -f -`.

Two traps: without a cluster no pool has a UID, so the objects are owned by nobody; and spares are rendered like all pods.
"""

import argparse
import sys

from prefill_operator.api import Pool
from prefill_operator.children import desired_children
from prefill_operator.cli.pool_file import (
    add_pool_arguments,
    add_settings_arguments,
    explain_refusal,
    load_pools,
    load_settings_of,
    plan_of,
)
from prefill_operator.cli.targets import offline_targets
from prefill_operator.cli.yaml_text import dump_yaml
from prefill_operator.errors import PoolInvalid
from prefill_operator.intent import read_intent
from prefill_operator.manifest import Manifest
from prefill_operator.model import ChildKind, CreatePod
from prefill_operator.names import PodIdentity, pod_name
from prefill_operator.render_objects import render_object
from prefill_operator.render_pod import render_pod
from prefill_operator.render_policy import RenderPolicy
from prefill_plan.errors import ConfigError, PlanError
from prefill_plan.model_spec import released_model_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pool_arguments(parser)
    add_settings_arguments(parser)
    parser.add_argument("--pods", type=int, metavar="N", help="pods to render (default: one; 0: none)", default=1)
    parser.add_argument(
        "--optional",
        action="append",
        default=[],
        choices=[ChildKind.POD_MONITOR.value, ChildKind.SCALED_OBJECT.value, ChildKind.NETWORK_POLICY.value],
        help="kinds the cluster has beside the built-in ones (default: those that the pool asks for)",
    )


def cmd_render(args: argparse.Namespace) -> int:
    policy = RenderPolicy.of(load_settings_of(args))
    optional = frozenset(ChildKind(kind) for kind in args.optional)
    if args.pods < 0:
        raise ConfigError(f"--pods {args.pods}: must be 0 or more")
    objects = []
    for pool in load_pools(args):
        try:
            objects += render_pool(pool, policy, num_pods=args.pods, optional=optional)
        except PoolInvalid as fault:
            raise ConfigError(f"{pool.kind} {pool.name}: {explain_refusal(fault.message)}") from fault
    sys.stdout.write(dump_yaml(objects))
    return 0


def render_pool(pool: Pool, policy: RenderPolicy, *, num_pods: int, optional: frozenset[ChildKind]) -> list[Manifest]:
    """Objects in the order in which they are made: what pods need comes first.

    Raises:
        PlanError: no plan is feasible.
        PoolInvalid: a part of the pool is refused.
    """
    plan = plan_of(pool)
    if not plan.feasible:
        raise PlanError(f"{pool.kind} {pool.name}: {plan.reason}: {plan.message}")
    kinds = optional or frozenset({ChildKind.POD_MONITOR, ChildKind.SCALED_OBJECT})
    model = released_model_spec()
    objects = [
        render_object(kind, pool, plan, policy, model=model, freeze_scale_down=False)
        for kind, _ in desired_children(read_intent(pool), plan, kinds)
    ]
    total = offline_targets(pool, plan).total
    for incarnation in range(1, min(num_pods, total) + 1):
        identity = PodIdentity(revision=plan.revision, incarnation=incarnation)
        name = pod_name(pool.kind, pool.name, identity)
        create = CreatePod(name=name, revision=plan.revision, incarnation=incarnation)
        objects.append(render_pod(pool, plan, create, policy))
    return objects
