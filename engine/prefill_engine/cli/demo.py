"""`prefill-engine demo`, the command behind `make demo`: a real prefill on this machine, each hand-off checked by a probe.

Exit 0 only if every turn took the expected path and every probe agreed; 1 otherwise; 2 for a wrong option.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from prefill_engine.demo import DemoOptions, Narrator, Prepared, run_demo
from prefill_engine.demo_nodes import STORE_BYTES_PER_SECOND, Cluster
from prefill_engine.demo_prompt import IMAGE_MESSAGE, MIN_TOKENS, SCREENSHOT_NAME
from prefill_engine.demo_report import (
    TurnReport,
    blocks_line,
    encoder_line,
    handoff_lines,
    repeat_line,
    summary_lines,
    window_line,
)
from prefill_engine.local_process import ENDING_SIGNALS
from prefill_engine.model.checkpoint_texts import PRESETS
from prefill_engine.probe_report import describe_probe
from prefill_engine.timeline import (
    render_timeline,
)
from prefill_engine.timeline_bars import (
    PLAIN_STYLE,
    TERMINAL_STYLE,
    Style,
    format_bytes,
)
from prefill_engine.trace import build_trace
from prefill_engine.worked_example import PROMPT_TOKENS, worked_example_lines
from prefill_plan.errors import ConfigError, PrefillError

_TRACE_NAME = "trace.json"
_TITLE = "Two prefill nodes and a vision encoder on this machine's CPU; each hand-off checked by a decode probe"
_TEXT_COLUMNS = 107
"""Of 120, less the names of the rows."""


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints. device: "cpu"; its times say nothing about a GPU."""

    ok: bool
    error: str
    device: str
    seconds: float
    trace: str
    turns: tuple[TurnReport, ...]


class PrintingNarrator(Narrator):
    """Tells the demo's story on a terminal or into a file, in at most 120 columns."""

    def __init__(self, style: Style) -> None:
        self._style = style

    def prepared(self, prepared: Prepared) -> None:
        spec, conversation = prepared.spec, prepared.conversation
        decoder = spec.num_layers - spec.first_decoder_layer
        self._row(
            "checkpoint",
            f"official format, fp8 and fp4, random weights, {format_bytes(prepared.num_bytes)}  "
            f"({prepared.write_seconds:.1f} s)",
        )
        self._row(
            "model",
            f"{spec.first_decoder_layer} encoder + {decoder} decoder layers, window of {spec.window_tokens} tokens, "
            f"decoder runs the last {prepared.keep_tokens}",
        )
        sizes = [f"{len(message):,}" for message in conversation.messages]
        sizes[IMAGE_MESSAGE] = f"({len(conversation.messages[IMAGE_MESSAGE]) - 1:,} and {SCREENSHOT_NAME})"
        self._row("prompt", f"{conversation.source}, as a conversation of {' + '.join(sizes)} tokens")

    def started(self, cluster: Cluster, *, seconds: float) -> None:
        for node in cluster.nodes.values():
            self._row(
                f"node {node.name}",
                f"engine pid {node.engine.pid}, {node.engine.endpoint}, CPU, reference kernels | kvd pid {node.kvd.pid}, "
                f"{format_bytes(node.kvd.config.pool_bytes)} of /dev/shm",
            )
        self._row(
            "store",
            f"one directory, both nodes'; READS SLOWED to {format_bytes(STORE_BYTES_PER_SECOND)}/s by the demo: its hits are a "
            "thousand times smaller than real ones, its steps are not shorter",
        )
        self._row(
            "shared",
            f"vision encoder pid {cluster.encoder.pid}, {cluster.encoder.endpoint} | "
            f"directory service pid {cluster.directory.pid}  ({seconds:.1f} s)",
        )

    def happened(self, what: str, *lines: str) -> None:
        say("")
        for index, line in enumerate(lines):
            self._row(what if index == 0 else "", line)

    def turn_done(self, turn: TurnReport) -> None:
        style = self._style
        say("")
        say(render_timeline(turn.record, style=style))
        lines = (("hit blocks", blocks_line(turn)), ("window KV", window_line(turn)), ("encoder", encoder_line(turn)))
        for name, text in lines:
            if text:
                self._row(name, text)
        for index, line in enumerate(handoff_lines(turn)):
            self._row("hand-over" if index == 0 else "", line)
        verdict, distance = describe_probe(turn.probe)
        if text := repeat_line(turn):
            self._row("answer", text, style.good)
        colour = style.bad if turn.probe.problems else style.good
        self._row("probe", verdict, colour)
        self._row("", distance)
        for problem in turn.problems:
            self._row("PROBLEM", problem, style.bad)

    def _row(self, name: str, text: str, colour: str = "") -> None:
        style = self._style
        reset = style.reset if colour else ""
        for index, line in enumerate(textwrap.wrap(text, _TEXT_COLUMNS, break_long_words=False)):
            say(f"  {style.quiet}{name if index == 0 else '':<10}{style.reset} {colour}{line}{reset}")


def say(text: str) -> None:
    """Prints at once, also into a pipe: who waits sees where it stands."""
    print(text, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="empty or new directory for checkpoint, store, logs and trace, all kept (default: a temporary one, removed at "
        "the end)",
    )
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="checkpoint size (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=1600,
        metavar="N",
        help="length of the whole conversation (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing before")


def cmd_demo(args: argparse.Namespace) -> int:
    if args.prompt_tokens < MIN_TOKENS:
        raise ConfigError(f"--prompt-tokens {args.prompt_tokens}, expected at least {MIN_TOKENS}; nothing was started")
    previous = {number: signal.signal(number, _exit_on_signal) for number in ENDING_SIGNALS}
    try:
        with _work_dir(args.work_dir) as work_dir:
            return _demo(args, work_dir)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _demo(args: argparse.Namespace, work_dir: Path) -> int:
    start = time.monotonic()
    style = TERMINAL_STYLE if sys.stdout.isatty() else PLAIN_STYLE
    narrator = Narrator() if args.json else PrintingNarrator(style)
    turns: tuple[TurnReport, ...] = ()
    error = ""
    if not args.json:
        say(f"{style.strong}{_TITLE}{style.reset}")
        say("")
    try:
        turns = run_demo(DemoOptions(work_dir=work_dir, preset=args.preset, num_tokens=args.prompt_tokens), narrator)
    except PrefillError as failure:
        error = failure.message
    trace = ""
    if args.work_dir is not None:
        path = work_dir / _TRACE_NAME
        path.write_bytes(build_trace([turn.record for turn in turns]))
        trace = str(path)
    ok = not error and not any(turn.problems for turn in turns)
    summary = DemoSummary(ok=ok, error=error, device="cpu", seconds=time.monotonic() - start, trace=trace, turns=turns)
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
    say(f"{style.strong}The turns{style.reset}")
    for line in summary_lines(summary.turns):
        say(f"  {line}")
    say("")
    if summary.trace:
        say(f"  trace      {summary.trace}")
        say("             open it in https://ui.perfetto.dev or chrome://tracing")
    else:
        say("  trace      with --work-dir DIR the checkpoint, store, logs and a trace for ui.perfetto.dev are kept")
    say("  times      are those of a small random model on this CPU; they say nothing about a GPU")
    colour, verdict = (style.good, "every turn took the expected path, every probe agreed")
    if not summary.ok:
        colour, verdict = (style.bad, "NOT RIGHT, see the problems above")
    say(f"  {colour}verdict    {verdict}{style.reset} ({summary.seconds:.0f} s)")


@contextlib.contextmanager
def _work_dir(wanted: Path | None) -> Iterator[Path]:
    """Raises ConfigError: the directory is not empty (an old store would turn the cold turn into a hit), or not usable."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="prefill-demo-") as directory:
            yield Path(directory)
        return
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        entries = sorted(entry.name for entry in wanted.iterdir())
    except OSError as error:
        raise ConfigError(f"--work-dir {wanted}: {error.strerror}; nothing was started") from error
    if entries:
        raise ConfigError(
            f"--work-dir {wanted} is not empty (it has {entries[0]}); name a new one; nothing was started"
        )
    yield wanted


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """A signal as an exception, so that every process is ended on the way out; which no second one may interrupt."""
    del frame
    for each in ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
