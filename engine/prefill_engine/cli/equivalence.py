"""`prefill-engine equivalence`: compact against mask truncation. Exit 0 equivalent, 1 not, 2 usage or no checkpoint."""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from prefill_engine.equivalence import TrajectoryStep, compare_metadata, compare_trajectory, metadata_cases
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.weights import load_parameters
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.op_sets import load_ops
from prefill_plan.config import RecordFormat
from prefill_plan.errors import PrefillError
from prefill_plan.model_spec import load_model_spec, released_model_spec
from prefill_plan.positions import validate_keep

_ROLLBACK_TOKENS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="1: metadata, no weights, released sizes; 2: logprobs of --model",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint directory; level 1 reads its config only")
    parser.add_argument("--prompt-tokens", type=int, default=300, help="level 2: length of the random prompt")
    parser.add_argument("--steps", type=int, default=16, help="level 2: given tokens after the prompt")
    parser.add_argument("--keep-tokens", type=int, help="level 2; default: window + 12, the engine's 140 at window 128")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="level 2: rows per chunk of the prompt")
    parser.add_argument("--seed", type=int, default=0, help="level 2: of the random tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def cmd_equivalence(args: argparse.Namespace) -> int:
    try:
        if args.level == 1:
            return _metadata(args)
        if args.model is None:
            print("prefill-engine equivalence: --level 2 needs --model DIR", file=sys.stderr)
            return 2
        for option, value, least in (
            ("--prompt-tokens", args.prompt_tokens, 1),
            ("--chunk-tokens", args.chunk_tokens, 1),
            ("--steps", args.steps, 0),
        ):
            if value < least:
                print(f"prefill-engine equivalence: {option} {value}: expected at least {least}", file=sys.stderr)
                return 2
        return _trajectory(args)
    except PrefillError as error:
        print(f"prefill-engine equivalence: {error}", file=sys.stderr)
        return 2


def _metadata(args: argparse.Namespace) -> int:
    spec = released_model_spec() if args.model is None else load_model_spec(args.model)
    start = time.monotonic()
    report = compare_metadata(spec, metadata_cases(spec))
    seconds = time.monotonic() - start
    if args.json:
        print(json.dumps({"equivalent": not report.mismatches, "seconds": seconds, **asdict(report)}))
    else:
        print(f"{'prompts and chunkings':<24}{report.num_cases:>14,}")
        print(f"{'chunks':<24}{report.num_chunks:>14,}")
        print(f"{'kept decoder rows':<24}{report.num_kept_rows:>14,}")
        print(f"{'dropped decoder rows':<24}{report.num_dropped_rows:>14,}")
        print(f"{'window keys of kept rows':<24}{report.num_window_keys:>14,}")
        for line in report.mismatches:
            print(f"DIFFERS  {line}")
        print(f"level 1: {_verdict(not report.mismatches)} in {seconds:.1f} s")
    return 1 if report.mismatches else 0


def _trajectory(args: argparse.Namespace) -> int:
    spec = load_model_spec(args.model)
    keep = spec.window_tokens + 2 * _ROLLBACK_TOKENS if args.keep_tokens is None else args.keep_tokens
    validate_keep(keep, spec.window_tokens, _ROLLBACK_TOKENS)
    ops, device = load_ops("ref"), torch.device("cpu")
    model = DeepseekV41Flash(
        spec,
        load_parameters(args.model, spec, device=device, expert_range=range(spec.num_experts)),
        ops=ops,
        numerics=PRODUCTION,
        engram_tables=build_engram_tables(spec, args.model / "tokenizer.json"),
        record_format=RecordFormat.FP4,
    )
    tokens = np.random.default_rng(args.seed).integers(0, spec.vocab_size, args.prompt_tokens + args.steps)
    steps = compare_trajectory(
        model,
        tokens.astype(np.int32),
        prompt_tokens=args.prompt_tokens,
        keep_tokens=keep,
        chunk_tokens=args.chunk_tokens,
        ops=ops,
        rollback_tokens=_ROLLBACK_TOKENS,
    )
    equivalent = all(step.max_diff == 0.0 and step.top_equal for step in steps)
    if args.json:
        rows = [asdict(step) for step in steps]
        print(json.dumps({"equivalent": equivalent, "seed": args.seed, "keep_tokens": keep, "steps": rows}))
    else:
        print(f"seed {args.seed}, prompt {args.prompt_tokens}, keep {keep}, chunks of {args.chunk_tokens}")
        print(_table(steps))
        print(f"level 2: {_verdict(equivalent)}")
    return 0 if equivalent else 1


def _table(steps: tuple[TrajectoryStep, ...]) -> str:
    lines = [f"{'position':>8}  {'max |d logprob|':>15}  top-K"]
    lines += [f"{s.position:>8}  {s.max_diff:>15.3g}  {'equal' if s.top_equal else 'DIFFERS'}" for s in steps]
    return "\n".join(lines)


def _verdict(equivalent: bool) -> str:
    return "compact equals mask on every kept row" if equivalent else "NOT EQUIVALENT"
