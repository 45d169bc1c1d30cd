"""`prefill-engine demo`, the command behind `make demo`: a real prefill on this machine, each hand-off checked by a probe.

Exit 0 only if every turn took the expected path and every probe agreed; 1 otherwise; 2 for a wrong option.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import msgspec

from prefill_engine.demo import DemoOptions, Narrator, Prepared, TurnReport, run_demo
from prefill_engine.local_engine import LocalEngine
from prefill_engine.model.checkpoint_texts import PRESETS
from prefill_engine.probe_report import describe_probe
from prefill_engine.timeline import PLAIN_STYLE, TERMINAL_STYLE, Style, format_bytes, render_timeline
from prefill_engine.trace import build_trace
from prefill_engine.worked_example import PROMPT_TOKENS, worked_example_lines
from prefill_plan.errors import ConfigError, PrefillError

_TRACE_NAME = "trace.json"
_MIN_TOKENS = 400
"""Below this, a turn is shorter than a block and nothing is hit."""


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints. device: "cpu"; its times say nothing about a GPU."""

    ok: bool
    error: str
    device: str
    seconds: float
    trace: str
    turns: tuple[TurnReport, ...]


class PrintingNarrator(Narrator):
    """Tells the demo's story on a terminal or into a file."""

    def __init__(self, style: Style) -> None:
        self._style = style

    def prepared(self, prepared: Prepared) -> None:
        spec, conversation = prepared.spec, prepared.conversation
        decoder = spec.num_layers - spec.first_decoder_layer
        self._fact(
            "checkpoint",
            f"official format, fp8 and fp4, random weights, {format_bytes(prepared.num_bytes)}",
            prepared.write_seconds,
        )
        self._row(
            "model",
            f"{spec.first_decoder_layer} encoder + {decoder} decoder layers, window of {spec.window_tokens} tokens, "
            f"decoder runs the last {prepared.keep_tokens}",
        )
        sizes = " + ".join(f"{len(message):,}" for message in conversation.messages)
        self._fact("prompt", f"{conversation.source}, as a conversation of {sizes} tokens", None)

    def engine_ready(self, engine: LocalEngine, *, seconds: float, is_restart: bool) -> None:
        if is_restart:
            say("")
            self._fact(
                "restart",
                f"engine killed and started again on the same store, pid {engine.pid}",
                seconds,
            )
            self._row("", "its window snapshots were in its memory only; the blocks are in the store")
        else:
            self._fact("engine", f"pid {engine.pid}, {engine.endpoint}, CPU, reference kernels, file store", seconds)

    def turn_done(self, turn: TurnReport) -> None:
        style = self._style
        say("")
        say(render_timeline(turn.record, style=style))
        how = "pushed into a decode peer's memory, accepted" if turn.handoff_mode == "push" else "pulled, lease held"
        num_bytes = format_bytes(turn.handoff_bytes)
        self._row("hand-over", f"{num_bytes} by {turn.handoff_transport}: {how}; checksums right")
        verdict, distance = describe_probe(turn.probe)
        colour = style.bad if turn.probe.problems else style.good
        self._row("probe", f"{colour}{verdict}{style.reset}")
        self._row("", distance)
        for problem in turn.problems:
            self._row("PROBLEM", f"{style.bad}{problem}{style.reset}")

    def _fact(self, name: str, text: str, seconds: float | None) -> None:
        took = "" if seconds is None else f"  ({seconds:.1f} s)"
        self._row(name, text + took)

    def _row(self, name: str, text: str) -> None:
        say(f"  {self._style.quiet}{name:<10}{self._style.reset} {text}")


def say(text: str) -> None:
    """Prints at once, also into a pipe: who waits sees where it stands."""
    print(text, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="empty or new directory for checkpoint, store, log and trace, all kept (default: a temporary one, of which "
        "the trace and the log are kept)",
    )
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="checkpoint size (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=2000,
        metavar="N",
        help="length of the whole conversation (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing before")


def cmd_demo(args: argparse.Namespace) -> int:
    if args.prompt_tokens < _MIN_TOKENS:
        raise ConfigError(f"--prompt-tokens {args.prompt_tokens}, expected at least {_MIN_TOKENS}; nothing was started")
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return _demo(args)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _demo(args: argparse.Namespace) -> int:
    start = time.monotonic()
    work_dir = _work_dir(args.work_dir)
    style = TERMINAL_STYLE if sys.stdout.isatty() else PLAIN_STYLE
    narrator = Narrator() if args.json else PrintingNarrator(style)
    turns: tuple[TurnReport, ...] = ()
    error = ""
    if not args.json:
        say(
            f"{style.strong}A prefill engine on this machine's CPU, each hand-off checked by a decode probe{style.reset}"
        )
        say("")
    try:
        turns = run_demo(DemoOptions(work_dir=work_dir, preset=args.preset, num_tokens=args.prompt_tokens), narrator)
    except PrefillError as failure:
        error = failure.message
    trace = work_dir / _TRACE_NAME
    trace.write_bytes(build_trace([turn.record for turn in turns]))
    if args.work_dir is None:
        _remove_bulk(work_dir)
    ok = not error and not any(turn.problems for turn in turns)
    summary = DemoSummary(
        ok=ok, error=error, device="cpu", seconds=time.monotonic() - start, trace=str(trace), turns=turns
    )
    if args.json:
        print(msgspec.json.encode(summary).decode())
    else:
        _print_end(summary, style)
    return 0 if ok else 1


def _print_end(summary: DemoSummary, style: Style) -> None:
    if summary.error:
        print(f"prefill-engine demo: {summary.error}", file=sys.stderr)
        return
    say("")
    say(
        f"{style.strong}The worked example at L = {PROMPT_TOKENS:,}{style.reset}: the released model, FP4 records; "
        "arithmetic, nothing was run"
    )
    for line in worked_example_lines():
        say(f"  {line}")
    say("")
    say(f"  trace      {summary.trace} (open it in https://ui.perfetto.dev or chrome://tracing)")
    say("  times      are those of a small random model on this CPU; they say nothing about a GPU")
    colour, verdict = (style.good, "every turn took the expected path, every probe agreed")
    if not summary.ok:
        colour, verdict = (style.bad, "NOT RIGHT, see the problems above")
    say(f"  {colour}verdict    {verdict}{style.reset} ({summary.seconds:.0f} s)")


def _work_dir(wanted: Path | None) -> Path:
    """Raises ConfigError: the directory is not empty (an old store would turn the cold turn into a hit), or not usable."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="prefill-demo-"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        entries = sorted(entry.name for entry in wanted.iterdir())
    except OSError as error:
        raise ConfigError(f"--work-dir {wanted}: {error.strerror}; nothing was started") from error
    if entries:
        raise ConfigError(
            f"--work-dir {wanted} is not empty (it has {entries[0]}); name a new one; nothing was started"
        )
    return wanted


def _remove_bulk(work_dir: Path) -> None:
    for name in ("checkpoint", "store"):
        shutil.rmtree(work_dir / name, ignore_errors=True)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """SIGTERM as an exception, so that the engine is ended on the way out."""
    del frame
    sys.exit(128 + number)
