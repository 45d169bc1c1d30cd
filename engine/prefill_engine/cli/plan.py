"""`prefill-engine plan`: what fits on a GPU, which EP it takes, and why. Needs no GPU and no weights.

Prints the memory plan of prefill_plan.memory, which the operator uses as well, so both always say the same.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prefill_plan.errors import ConfigError, PrefillError
from prefill_plan.memory import (
    FULL_TIER,
    GPU_BYTES,
    PLANNED_EP_SIZES,
    EngramPlace,
    MemoryChoice,
    MemoryOption,
    MemoryPlan,
    PlanSettings,
    minimum_ep,
)
from prefill_plan.model_spec import ModelSpec, load_model_spec, released_model_spec

_AUTO = "auto"
_BAR_WIDTH = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gpu = parser.add_mutually_exclusive_group(required=True)
    gpu.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPU_BYTES)}")
    gpu.add_argument("--gpu-bytes", type=int, metavar="N", help="memory of another GPU, as its driver reports it")
    parser.add_argument("--ep", type=int, metavar="N", help="plan only this EP (default: try 2, 4, 8)")
    parser.add_argument(
        "--engram",
        choices=[_AUTO, *EngramPlace],
        default=_AUTO,
        help="where Engram tables live; auto prefers the GPU at the same EP (default: auto)",
    )
    parser.add_argument("--context", type=int, metavar="N", help="longest prompt in tokens (default: 131072)")
    parser.add_argument("--model", type=Path, metavar="PATH", help="checkpoint or config.json (default: the release)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, in bytes")


def cmd_plan(args: argparse.Namespace) -> int:
    """Exit 0: a plan fits; 1: none does (the sums are printed); 2: wrong option or setting."""
    try:
        usable_bytes = args.gpu_bytes if args.gpu is None else _usable_bytes(args.gpu)
        spec = load_model_spec(args.model) if args.model else released_model_spec()
        settings = _settings(spec, args.context)
        places = tuple(EngramPlace) if args.engram == _AUTO else (EngramPlace(args.engram),)
        choice = minimum_ep(
            spec,
            usable_bytes=usable_bytes,
            settings=settings,
            engram_places=places,
            ep_sizes=PLANNED_EP_SIZES if args.ep is None else (args.ep,),
        )
    except PrefillError as error:
        print(f"prefill-engine plan: {error}", file=sys.stderr)
        return 2
    gpu = args.gpu or "GPU"
    model = str(args.model) if args.model else "DeepSeek-V4.1-Flash"
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(choice, gpu=gpu, model=model)), indent=2).decode())
    else:
        print("\n".join(_lines(choice, spec, gpu=gpu, model=model)))
    return 0 if choice.chosen else 1


def _usable_bytes(gpu: str) -> int:
    if gpu not in GPU_BYTES:
        raise ConfigError(f"unknown GPU {gpu!r}, expected one of {', '.join(GPU_BYTES)}, or --gpu-bytes N", gpu=gpu)
    return GPU_BYTES[gpu]


def _settings(spec: ModelSpec, context_tokens: int | None) -> PlanSettings:
    """The full configuration; a model with short positions lowers the default context, never a given one."""
    full = PlanSettings()
    if context_tokens is None:
        context_tokens = min(full.context_tokens, spec.max_position_tokens)
    return msgspec.structs.replace(full, context_tokens=context_tokens)


def _lines(choice: MemoryChoice, spec: ModelSpec, *, gpu: str, model: str) -> Iterator[str]:
    full = choice.options[0].full
    settings = full.settings
    yield (
        f"{model} on {gpu}: {_gb(full.usable_bytes)} GB usable per GPU, {_gb(full.budget_bytes)} GB after fragmentation"
    )
    yield (
        f"Full configuration: context {settings.context_tokens:,}, chunk {settings.chunk_tokens:,} rows, "
        f"{settings.redundant_experts} redundant experts,"
    )
    yield f"per GPU {settings.max_sequences} sequences and a KV pool of {settings.pool_tokens:,} tokens"
    yield ""
    yield from _option_table(choice)
    yield ""
    if choice.chosen is None:
        yield "No EP fits, even with every setting reduced. The closest:"
        yield ""
        closest = max(choice.options, key=lambda option: option.plan.spare_bytes)
        yield from _plan_table(closest.plan, spec)
        yield f"{closest.name}, smallest tier: {_gb(-closest.plan.spare_bytes)} GB more per GPU would be needed."
        return
    yield from _chosen_lines(choice, choice.chosen)
    yield ""
    yield from _plan_table(choice.chosen.plan, spec)
    yield from _capacity_lines(choice.chosen.plan)


def _option_table(choice: MemoryChoice) -> Iterator[str]:
    yield f"     {'EP':>2}  {'Engram':<6}  {'need GB':>8}  {'limit GB':>8}  {'KV tokens':>13}  verdict"
    for option in choice.options:
        mark = "->" if option is choice.chosen else "  "
        tokens = f"{option.plan.max_pool_tokens:,}" if option.tier else "-"
        yield (
            f"  {mark} {option.ep_size:>2}  {option.engram:<6}  {_gb(option.full.need_bytes):>8}  "
            f"{_gb(option.full.budget_bytes):>8}  {tokens:>13}  {_verdict(option)}"
        )


def _verdict(option: MemoryOption) -> str:
    if option.tier is None:
        return f"no: {_gb(-option.plan.spare_bytes)} GB short in the smallest tier"
    if option.tier == FULL_TIER:
        return f"fits, {_gb(option.plan.spare_bytes)} GB to spare"
    return f"reduced only: {option.tier}"


def _chosen_lines(choice: MemoryChoice, chosen: MemoryOption) -> Iterator[str]:
    is_asked_for = len({option.ep_size for option in choice.options}) == 1
    reason = "the EP asked for" if is_asked_for else "the smallest EP that fits"
    if any(option.tier and option.ep_size == chosen.ep_size and option is not chosen for option in choice.options):
        reason += "; Engram on the GPU goes before the host"
    yield f"Chosen: {chosen.name} ({reason})."
    if chosen.tier == FULL_TIER:
        return
    yield f"Reduced to fit, since the full configuration is {_gb(-chosen.full.spare_bytes)} GB short:"
    yield f"  {', '.join(_changes(chosen.full.settings, chosen.plan.settings))}"
    full = next((option for option in choice.options if option.tier == FULL_TIER), None)
    yield f"Full configuration: {full.name if full else 'no EP fits'}."


def _changes(full: PlanSettings, reduced: PlanSettings) -> Iterator[str]:
    pairs = {
        "chunk": (full.chunk_tokens, reduced.chunk_tokens),
        "MoE sub-chunk": (full.moe_sub_tokens, reduced.moe_sub_tokens),
        "sequences": (full.max_sequences, reduced.max_sequences),
        "redundant experts": (full.redundant_experts, reduced.redundant_experts),
        "KV pool": (full.pool_tokens, reduced.pool_tokens),
    }
    for name, (before, after) in pairs.items():
        if before != after:
            yield f"{name} {before:,} -> {after:,}"


def _plan_table(plan: MemoryPlan, spec: ModelSpec) -> Iterator[str]:
    weights, work = plan.weights, plan.workspace
    slots = (spec.num_experts + plan.settings.redundant_experts) // plan.ep_size
    rows = {
        f"experts, {slots} slots x {spec.num_layers} layers": weights.experts,
        "dense weights": weights.dense,
        f"Engram tables, 1/{plan.ep_size}": weights.engram,
        "draft": weights.draft,
        "vision": weights.vision,
        "bf16 expansion": weights.expansion,
        f"KV pool, {plan.settings.pool_tokens:,} tokens": plan.kv_bytes,
        f"state, {plan.settings.max_sequences} sequences": plan.state_bytes,
        "residual streams": work.residual,
        "attention / MoE phase": work.phase,
        "index logits": work.index_logits,
        "KV gather": work.kv_gather,
        "Engram staging": work.engram_staging,
        "all-to-all": work.all_to_all,
        "CUDA context": plan.context_bytes,
    }
    yield f"  {'per GPU':<32} {'GB':>8}"
    for name, num_bytes in rows.items():
        if num_bytes:
            bar = "#" * round(_BAR_WIDTH * num_bytes / plan.budget_bytes)
            yield f"  {name:<32} {_gb(num_bytes):>8}  {bar}".rstrip()
    yield f"  {'need':<32} {_gb(plan.need_bytes):>8}"
    yield f"  {'limit':<32} {_gb(plan.budget_bytes):>8}"
    yield f"  {'to spare' if plan.fits else 'short':<32} {_gb(abs(plan.spare_bytes)):>8}"
    yield ""


def _capacity_lines(plan: MemoryPlan) -> Iterator[str]:
    yield f"KV pool:     up to {plan.max_pool_tokens:,} tokens per GPU if it gets all spare memory"
    yield f"host memory: {_gb(plan.host_bytes)} GB per node for Engram tables, KV tiers not counted"


def _as_json(choice: MemoryChoice, *, gpu: str, model: str) -> dict[str, object]:
    return {
        "model": model,
        "gpu": gpu,
        "usable_bytes": choice.options[0].full.usable_bytes,
        "full_ep": choice.full_ep,
        "any_ep": choice.any_ep,
        "chosen": _option_as_json(choice.chosen) if choice.chosen else None,
        "options": [_option_as_json(option) for option in choice.options],
        "explanation": choice.explain().splitlines(),
    }


def _option_as_json(option: MemoryOption) -> dict[str, object]:
    return {
        "ep_size": option.ep_size,
        "engram": option.engram,
        "tier": option.tier,
        "full": _plan_as_json(option.full),
        "plan": _plan_as_json(option.plan),
    }


def _plan_as_json(plan: MemoryPlan) -> dict[str, object]:
    totals = {
        "weights_bytes": plan.weights.total,
        "workspace_bytes": plan.workspace.total,
        "need_bytes": plan.need_bytes,
        "spare_bytes": plan.spare_bytes,
        "fits": plan.fits,
    }
    return {**msgspec.structs.asdict(plan), **totals}


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
