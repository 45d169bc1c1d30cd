"""`prefill-engine make-checkpoint`: writes a random checkpoint in the official format, for demos, tests and size experiments.

The result loads like the real one and computes nothing of use. Nothing is written before config, tokenizer, target directory
and free space have been checked.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from prefill_engine.model.checkpoint_files import INDEX_NAME
from prefill_engine.model.checkpoint_texts import PRESETS, check_texts, read_custom, read_preset, without_quantisation
from prefill_engine.model.checkpoint_writer import WrittenFile, checkpoint_bytes, write_checkpoint
from prefill_plan.errors import ConfigError, PrefillError

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
    source = f"preset {args.preset}" if args.config is None else str(args.config)
    texts = read_preset(args.preset) if args.config is None else read_custom(args.config)
    if args.dense:
        texts = without_quantisation(texts)
    spec = check_texts(texts, source=source)
    num_bytes = checkpoint_bytes(spec)
    _prepare(args.out, num_bytes=num_bytes, force=args.force)
    start = time.monotonic()
    write_checkpoint(args.out, spec, texts, seed=args.seed, shard_bytes=args.shard_bytes, report=_print_file)
    kind = "fp8 and fp4" if spec.quantized else "dense bf16"
    print(
        f"{args.out}: {source}, {kind}, seed {args.seed}: {num_bytes / 1e6:,.1f} MB of random tensors "
        f"in {time.monotonic() - start:.1f} s"
    )


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
