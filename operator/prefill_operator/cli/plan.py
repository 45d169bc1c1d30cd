"""`prefill-operator plan`: what a pool becomes, and why. The same plan, by the same code, as in the cluster."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from prefill_operator.api import Pool
from prefill_operator.cli.pool_file import (
    add_pool_arguments,
    add_settings_arguments,
    explain_refusal,
    load_pools,
    load_settings_of,
    plan_of,
)
from prefill_operator.cli.targets import offline_sizes, offline_targets
from prefill_operator.host_memory import engine_memory_bytes, kvd_memory_bytes, shm_bytes
from prefill_operator.intent import Intent, read_intent
from prefill_operator.model import OperatorTimes
from prefill_operator.names import Reason, config_map_name
from prefill_operator.plan import PoolPlan, allowed_steps, memory_options, plans_memory
from prefill_operator.pool_api import AvailabilitySpec, PrefillPoolSpec, VisionSource
from prefill_operator.pool_vision import encoder_endpoints, rows_bytes, vision_gpu_bytes, vision_settings
from prefill_operator.quantity import quantity_bytes
from prefill_operator.render_container import memory_text
from prefill_operator.render_pod import refusal_text
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.shortages import shortages_per_year
from prefill_operator.spares import failure_rates
from prefill_operator.targets import Targets
from prefill_plan.config import Device
from prefill_plan.memory import EngramPlace, MemoryOption
from prefill_plan.model_spec import released_model_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pool_arguments(parser)
    add_settings_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per pool")


def cmd_plan(args: argparse.Namespace) -> int:
    """Exit 1: some pool has no feasible plan, its pods are refused, or quota does not even allow its replicas."""
    policy = RenderPolicy.of(load_settings_of(args))
    failed = False
    for index, pool in enumerate(load_pools(args)):
        plan = plan_of(pool)
        refusal = refusal_text(pool, plan, policy)
        failed |= bool(refusal) or not plan.feasible or bool(offline_targets(pool, plan).quota_message)
        if args.json:
            print(json.dumps(_as_json(pool, plan, refusal)))
        else:
            print(("\n" if index else "") + "\n".join(_lines(pool, plan, refusal)))
    return int(failed)


def _as_json(pool: Pool, plan: PoolPlan, refusal: str) -> dict[str, Any]:
    targets = offline_targets(pool, plan)
    return {
        "kind": str(pool.kind),
        "namespace": pool.namespace,
        "name": pool.name,
        "feasible": plan.feasible,
        "reason": str(plan.reason),
        "message": plan.message,
        "refusal": refusal,
        "ep": plan.ep,
        "engram": str(plan.engram or ""),
        "degraded": plan.degraded,
        "hash": plan.hash,
        "revision": plan.revision,
        "kvTokensPerGPU": plan.kv_tokens_per_gpu,
        "replicas": targets.replicas,
        "spares": targets.spares,
        "total": targets.total,
        "gpus": targets.total * plan.gpus,
        "expectedAvailability": targets.availability,
        "vision": vision_settings(pool.spec).get("vision") if isinstance(pool.spec, PrefillPoolSpec) else None,
    }


def _lines(pool: Pool, plan: PoolPlan, refusal: str) -> Iterator[str]:
    yield f"{pool.kind} {pool.namespace}/{pool.name}"
    if not plan.feasible:
        yield _row("plan", f"none: {plan.reason}")
        if plan.reason is not Reason.SPEC_INVALID:
            yield from _sums(pool)
        if plan.reason is not Reason.NO_EP_FITS:
            yield _row("why", plan.message)
        return
    yield _row("plan", _plan_text(plan))
    yield from _sums(pool)
    if isinstance(pool.spec, PrefillPoolSpec):
        yield from _memory_lines(pool.spec, plan)
        yield from _vision_lines(pool.spec)
    yield _row("plan hash", plan.hash)
    yield _row("revision", f"{plan.revision}, ConfigMap {config_map_name(pool.kind, pool.name, plan.revision)}")
    for sized in offline_sizes(pool):
        yield from _count_lines(read_intent(sized), plan, offline_targets(sized, plan))
    yield from (_row("note", note) for note in plan.notes)
    if refusal:
        yield _row("refused", explain_refusal(f"{refusal}; no pod would be made"))


def _plan_text(plan: PoolPlan) -> str:
    if plan.device is Device.CPU:
        return f"CPU profile, one rank per pod (EP {plan.ep} on paper); its figures say nothing about GPUs"
    engram = f", Engram tables in {'host memory' if plan.engram == 'Host' else 'GPU memory'}" if plan.engram else ""
    tier = f", reduced to tier {plan.degraded}" if plan.degraded else ""
    return f"EP {plan.ep}{engram}{tier} ({' '.join(dict.fromkeys((plan.source.value, plan.reason.value)))})"


def _sums(pool: Pool) -> Iterator[str]:
    """One line per EP and Engram place that the spec allows, as far as memory is planned."""
    spec = pool.spec
    if not isinstance(spec, PrefillPoolSpec) or not plans_memory(spec):
        return
    for option in memory_options(spec, allowed_steps(spec), model=released_model_spec()):
        yield _row(f"EP {option.ep_size} {_place(option)}", _sum_text(option))


def _place(option: MemoryOption) -> str:
    return "gpu" if option.engram is EngramPlace.GPU else "host"


def _sum_text(option: MemoryOption) -> str:
    text = option.full.explain()
    if option.tier is None or option.full.fits:
        return text
    return f"{text}; tier {option.tier} fits (expertParallel.allowDegraded)"


def _memory_lines(spec: PrefillPoolSpec, plan: PoolPlan) -> Iterator[str]:
    if plan.kv_tokens_per_gpu is not None:
        yield _row("KV pool", f"{plan.kv_tokens_per_gpu:,} tokens per GPU")
    elif plan.device is not Device.CPU:
        yield _row("GPU memory", f"no sum: architecture {spec.model.architecture} is not planned")
    if spec.engine.resources is not None:
        yield _row("host memory", f"limit {spec.engine.resources.limits.get('memory', 'none')} per PE")
        return
    engine = engine_memory_bytes(spec, ep=plan.ep, engram_bytes=plan.engram_host_bytes)
    sidecar = kvd_memory_bytes(spec)
    per_node = max(1, spec.gpu.per_node // plan.ep)
    text = f"{engine / 1e9:.1f} GB per engine"
    if sidecar:
        text += f" and {sidecar / 1e9:.1f} GB per kvd"
    text += f"; {per_node} PEs per node = {per_node * (engine + sidecar) / 1e9:.1f} GB"
    if spec.gpu.host_memory_per_node is not None:
        text += f", limit {quantity_bytes(spec.gpu.host_memory_per_node) / 1e9:.1f} GB"
    yield _row("host memory", f"{text}; /dev/shm {memory_text(shm_bytes(spec))}")


def _vision_lines(spec: PrefillPoolSpec) -> Iterator[str]:
    vision = spec.vision
    if vision.mode is VisionSource.NONE:
        return
    whom = "an encoder inside each PE"
    if vision.ve_pool_ref is not None:
        whom = f"VEPool {vision.ve_pool_ref.name} ({', '.join(encoder_endpoints(vision))})"
    elif vision.endpoints:
        whom = ", ".join(vision.endpoints)
    on_gpu = vision_gpu_bytes(spec)
    gpu = f"; {on_gpu / 1e9:.1f} GB per GPU, inside reserved" if on_gpu else ""
    yield _row("images", f"{whom}; rows {rows_bytes(spec) >> 20}Mi of /dev/shm; {vision.image_seconds} s each{gpu}")


def _count_lines(intent: Intent, plan: PoolPlan, targets: Targets) -> Iterator[str]:
    text = f"{targets.replicas} + {targets.spares} spares = {targets.replicas + targets.spares}"
    if targets.quota_message:
        text = f"{targets.total} of the {targets.replicas} that are wanted"
    if plan.gpus and targets.total:
        nodes = -(-targets.total // targets.per_node)
        count = f"{nodes} node{'s' if nodes > 1 else ''}"
        text += f", {targets.total * plan.gpus} GPUs, {targets.per_node} per node, so {count} or more"
    if intent.autoscaling is not None:
        limits = f"{intent.autoscaling.min_replicas} to {intent.autoscaling.max_replicas}"
        text += f"; replicas are set from outside ({intent.autoscaling.actuator}, {limits})"
    yield _row(f"{intent.noun}s", text)
    if targets.quota_message or targets.cap:
        yield _row("quota", targets.quota_message or str(targets.cap))
    given = intent.redundancy.availability
    if given is not None and targets.availability is not None:
        yield _row(
            "availability", f"{targets.availability:.6f} expected, {_shortages(given, targets):.1f} shortages a year"
        )


def _shortages(given: AvailabilitySpec, targets: Targets) -> float:
    restart = float(given.restart_seconds or OperatorTimes().default_restart_seconds)
    rates = failure_rates(
        pe_mtbf=given.pe_mtbf_seconds,
        restart=restart,
        node_mtbf=given.node_mtbf_seconds,
        node_recovery=given.node_recovery_seconds or 0,
    )
    return shortages_per_year(
        targets.replicas,
        targets.spares,
        pes_per_node=targets.per_node,
        rates=rates,
        pe_mtbf=given.pe_mtbf_seconds,
        node_mtbf=given.node_mtbf_seconds,
    )


def _row(name: str, text: str) -> str:
    return f"  {name:<14}{text}"
