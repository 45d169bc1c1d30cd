"""`prefill-engine make-checkpoint`: writes a random checkpoint in the official format, for demos, tests and size experiments.

The result loads like the real one and computes nothing of use. With --vision-only it writes the vision tower alone: a random
one, or with --from that of a full checkpoint, which is what VE pods load. Nothing is written before config, tokenizer, target
directory and free space have been checked; a tower alone has no tokenizer, so none is asked for.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from prefill_engine.model.checkpoint_files import INDEX_NAME
from prefill_engine.model.checkpoint_texts import PRESETS, check_texts, read_custom, read_preset, without_quantisation
from prefill_engine.model.checkpoint_writer import (
    WrittenFile,
    checkpoint_bytes,
    stored_bytes,
    write_checkpoint,
)
from prefill_engine.model.tensor_names import build_vision_tensors
from prefill_engine.model.vision_cutout import cutout_tensors, write_cutout, write_random_tower
from prefill_engine.vision.weights import vision_catalogue
from prefill_plan.errors import ConfigError, PrefillError
from prefill_plan.model_spec import load_model_spec, parse_model_spec

_DEFAULT_SHARD_BYTES = 4 * 1024**3
_OWN_FILES = ("*.safetensors", INDEX_NAME, "config.json", "tokenizer.json", "tokenizer_config.json")
"""What --force deletes: the files a checkpoint consists of, nothing else of the directory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to create or fill")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--preset",
        choices=PRESETS,
        default=PRESETS[0],
        help="tiny: every kind of layer, window 16, serve it with keep_tokens 24; "
        "demo: the same with the release's window of 128 (default: tiny)",
    )
    source.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="write by this official config.json; a tokenizer.json beside it is used, else the presets' of 512 tokens",
    )
    source.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="DIR",
        help="with --vision-only: cut the vision tower out of this checkpoint, reading only its tensors",
    )
    parser.add_argument(
        "--vision-only",
        action="store_true",
        help="only vision.*, aligner.*, image_* and config.json: all that a vision encoder loads",
    )
    parser.add_argument("--dense", action="store_true", help="bf16 weights without scales instead of fp8 and fp4")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: 0)")
    parser.add_argument(
        "--shard-bytes",
        type=int,
        default=_DEFAULT_SHARD_BYTES,
        metavar="N",
        help="largest shard, unless a single tensor is larger (default: 4 GiB)",
    )
    parser.add_argument("--force", action="store_true", help="replace the checkpoint of a directory that is not empty")


def cmd_make_checkpoint(args: argparse.Namespace) -> int:
    """Exit 0: written; 1: the disk refused; 2: wrong config or option, directory not empty, no room."""
    try:
        _make(args)
    except PrefillError as error:
        print(f"prefill-engine make-checkpoint: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"prefill-engine make-checkpoint: {error}; the checkpoint is not complete", file=sys.stderr)
        return 1
    return 0


def _make(args: argparse.Namespace) -> None:
    if args.shard_bytes < 1:
        raise ConfigError(f"--shard-bytes is {args.shard_bytes}, expected at least 1; nothing was written")
    if args.source is not None:
        _cut_out(args)
        return
    source = f"preset {args.preset}" if args.config is None else str(args.config)
    texts = read_preset(args.preset) if args.config is None else read_custom(args.config)
    if args.dense:
        texts = without_quantisation(texts)
    spec = parse_model_spec(texts.config, source=source) if args.vision_only else check_texts(texts, source=source)
    num_bytes = stored_bytes(build_vision_tensors(spec).values()) if args.vision_only else checkpoint_bytes(spec)
    if num_bytes == 0:
        raise ConfigError(f"{source} has no vision_config with layers; nothing was written")
    _prepare(args.out, num_bytes=num_bytes, force=args.force)
    start = time.monotonic()
    sizes = {"seed": args.seed, "shard_bytes": args.shard_bytes}
    if args.vision_only:
        write_random_tower(args.out, spec, config=texts.config, **sizes, report=_print_file)
    else:
        write_checkpoint(args.out, spec, texts, **sizes, report=_print_file)
    kind = "dense bf16" if args.vision_only or not spec.quantized else "fp8 and fp4"
    _print_end(args.out, f"{source}, {kind}, seed {args.seed}", f"{num_bytes / 1e6:,.1f} MB of random tensors", start)


def _cut_out(args: argparse.Namespace) -> None:
    """--from: copies the tower of a checkpoint."""
    if not args.vision_only or args.dense:
        raise ConfigError(
            "--from copies a vision tower: give it with --vision-only and without --dense; nothing was written"
        )
    if args.source.resolve() == args.out.resolve():
        raise ConfigError(f"--out {args.out} is the checkpoint to read from; nothing was written")
    spec = load_model_spec(args.source)
    catalogue = vision_catalogue(args.source, spec)
    tensors = cutout_tensors(spec, catalogue)
    config = (args.source / "config.json").read_bytes()
    _prepare(args.out, num_bytes=stored_bytes(tensors), force=args.force)
    start = time.monotonic()
    write_cutout(args.out, tensors, catalogue, config=config, shard_bytes=args.shard_bytes, report=_print_file)
    size = f"{stored_bytes(tensors) / 1e6:,.1f} MB in {len(tensors)} tensors"
    _print_end(args.out, f"vision tower of {args.source}", size, start)


def _print_end(out: Path, what: str, size: str, start: float) -> None:
    print(f"{out}: {what}: {size} in {time.monotonic() - start:.1f} s")


def _prepare(directory: Path, *, num_bytes: int, force: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--out {directory} is a file, expected a directory; nothing was written")
    entries = sorted(entry.name for entry in directory.iterdir()) if directory.exists() else []
    if entries and not force:
        raise ConfigError(
            f"--out {directory} is not empty ({len(entries)} entries, the first is {entries[0]}); nothing was written. "
            "Name another directory, or replace the checkpoint in this one with --force"
        )
    directory.mkdir(parents=True, exist_ok=True)
    old_files = [path for pattern in _OWN_FILES for path in directory.glob(pattern)]
    free_bytes = shutil.disk_usage(directory).free + sum(path.stat().st_size for path in old_files)
    if num_bytes > free_bytes:
        raise ConfigError(
            f"--out {directory} has {free_bytes / 1e9:,.1f} GB free, the checkpoint needs {num_bytes / 1e9:,.1f} GB; "
            "nothing was written"
        )
    for path in old_files:
        path.unlink()


def _print_file(written: WrittenFile) -> None:
    tensors = f"  {written.num_tensors} tensors" if written.num_tensors else ""
    print(f"  {written.name:<36} {written.num_bytes / 1e6:>10,.2f} MB{tensors}", flush=True)
