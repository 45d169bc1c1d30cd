"""`prefill-engine request`: sends one prompt to an engine and prints its timeline; can check the hand-off with a decode probe.

With --image the files go along inside the request, and the engine has them encoded (its vision.mode).
"""

import argparse
import asyncio
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prefill_engine.client import (
    PRIORITIES,
    STORE_MODES,
    PrefillAttempt,
    PrefillClient,
    PrefillOptions,
    ServerInfo,
    block_keys_of,
)
from prefill_engine.client_images import PromptImage, place_images
from prefill_engine.client_ticket import HANDOFF_MODES
from prefill_engine.probe_report import ProbeReport, describe_probe
from prefill_engine.takeover import Outcome, TakenOver
from prefill_engine.takeover_way import TRANSPORTS, TakeOverWay, send_and_take_over
from prefill_engine.timeline import (
    AttemptRecord,
    Stage,
    render_timeline,
)
from prefill_engine.timeline_bars import (
    PLAIN_STYLE,
    TERMINAL_STYLE,
    Style,
    format_bytes,
)
from prefill_engine.trace import build_trace
from prefill_plan.errors import CallFailed, ConfigError, PrefillError
from prefill_plan.kv_layout import BLOCK_TOKENS
from prefill_plan.model_spec import load_model_spec

_USER_STATUS = ("INVALID_ARGUMENT", "OUT_OF_RANGE")
"""gRPC codes that mean the request itself is wrong (serving.md 1.1): exit 2."""
_LABEL = "request"


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints. error: "" = ok. handoff_fallbacks: components that came by gRPC since the transport was busy."""

    ok: bool
    error: str
    attempt: AttemptRecord
    handoff_bytes: int
    handoff_transport: str
    handoff_fallbacks: int
    stored_bytes: int
    probe: ProbeReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """files: encoded images, for the placeholders in token_ids; images: once they are in place of them."""

    token_ids: list[int]
    images: tuple[PromptImage, ...]
    files: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One request, sent and ended. error_exit: 0 = it went well, and record.error is empty."""

    record: AttemptRecord
    outcome: Outcome | None
    keep_tokens: int
    error_exit: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="gRPC address of a prefill engine")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text; needs --tokenizer")
    prompt.add_argument("--token-ids", type=Path, metavar="FILE", help="JSON array of token ids")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of the engine's model")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="png, jpeg, webp or gif; once per image placeholder of the prompt, in order (with --model)",
    )
    parser.add_argument(
        "--handoff",
        choices=("none", *HANDOFF_MODES),
        default="none",
        help="none: no ticket, KV is freed after the store (default); pull: take the hand-off over as a decode peer "
        "would: claim, read everything with checksums, settle; push: grant memory to the engine, which pushes into it; "
        "store-only: read the full blocks from --block-store, the rest as with pull",
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default=TRANSPORTS[0],
        help="how the bytes of a hand-off come: auto: the data transport where the engine has one, else gRPC (default); "
        "tcp, nixl: the data transport, of that kind, or nothing; grpc: ReadKv",
    )
    parser.add_argument(
        "--block-store",
        type=Path,
        metavar="DIR",
        help="the file store of the engine, or of its kvd, as mounted here, for --handoff store-only (with --model)",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="with --model: take the hand-off over, compute the next token from the handed bytes alone and hold it "
        "against a run of our own (greedy requests; on a small model)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint directory for --probe, --image and --handoff store-only"
    )
    parser.add_argument(
        "--store", choices=STORE_MODES, default=STORE_MODES[0], help="what to do with new blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--hit-tokens", type=int, metavar="N", help="largest prefix hit allowed, in whole blocks (default: any)"
    )
    parser.add_argument("--priority", choices=PRIORITIES, default="standard")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, metavar="N", help="deadline (default: 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the timeline")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (open it in ui.perfetto.dev)")


def cmd_request(args: argparse.Namespace) -> int:
    """Exit 0: computed (and taken over, and verified, as asked); 1: it failed; 2: the request or an option is wrong."""
    try:
        prompt = _Prompt(token_ids=_read_prompt(args), images=(), files=_read_images(args))
        _check_options(args)
        prompt, run = asyncio.run(_send(args, prompt))
    except ConfigError as error:
        return _usage(error)
    probe: ProbeReport | None = None
    own_stages: list[Stage] = []
    failure, exit_code = run.record.error, run.error_exit
    taken = run.outcome.taken_over if run.outcome is not None else None
    if args.probe and taken is not None:
        try:
            probe, stage = _probe(args, run, taken, prompt)
            own_stages.append(stage)
        except PrefillError as error:
            failure, exit_code = str(error), 1
    if probe is not None and probe.problems:
        failure, exit_code = f"the decode probe found: {'; '.join(probe.problems)}", 1
    record = msgspec.structs.replace(run.record, own_stages=tuple(own_stages), error=failure)
    report = RequestReport(
        ok=exit_code == 0,
        error=failure,
        attempt=record,
        handoff_bytes=taken.num_bytes if taken is not None else 0,
        handoff_transport=taken.transport if taken is not None else "",
        handoff_fallbacks=taken.num_fallbacks if taken is not None else 0,
        stored_bytes=taken.stored_bytes if taken is not None else 0,
        probe=probe,
    )
    _print_report(args, report)
    if args.trace is not None:
        args.trace.write_bytes(build_trace((record,)))
    return exit_code


async def _send(args: argparse.Namespace, prompt: _Prompt) -> tuple[_Prompt, _Run]:
    """The prompt as it was sent, and what became of it. Raises ConfigError: its images do not fit it; nothing was sent."""
    mode = "pull" if args.handoff == "none" else args.handoff
    handoff = args.handoff != "none" or args.probe
    options = PrefillOptions(store=args.store, handoff=handoff, mode=mode, priority=args.priority)
    attempt: PrefillAttempt | None = None
    outcome, keep_tokens, error, error_exit = None, 0, "", 0
    async with PrefillClient(args.endpoint) as client:
        try:
            info = await client.server_info()
            keep_tokens = info.keep_tokens
            if prompt.files:
                prompt = _place(args, prompt, info, options.cache_scope)
                options = dataclasses.replace(options, images=prompt.images)
            if args.hit_tokens is not None:
                keys = block_keys_of(info, prompt.token_ids, cache_scope=options.cache_scope, images=prompt.images)
                options = dataclasses.replace(options, hit_keys=keys[: args.hit_tokens // BLOCK_TOKENS])
            attempt = client.prefill(prompt.token_ids, options, timeout_seconds=args.timeout_seconds)
            way = TakeOverWay(
                mode=mode,
                transport=args.transport,
                model=args.model,
                store=args.block_store,
                kv_format=info.format,
                offered=info.transports,
            )
            outcome = await send_and_take_over(attempt, way, endpoint=args.endpoint)
        except CallFailed as failure:
            error, error_exit = str(failure), 2 if failure.status in _USER_STATUS else 1
        except PrefillError as failure:
            if attempt is None and isinstance(failure, ConfigError):
                raise
            error, error_exit = str(failure), 2 if isinstance(failure, ConfigError) else 1
    record = AttemptRecord(
        label=_LABEL, request_id="", prompt_tokens=len(prompt.token_ids), sent_at_seconds=0.0, events=(), error=error
    )
    if attempt is not None:
        record = attempt.record(_LABEL, error=error)
    return prompt, _Run(record=record, outcome=outcome, keep_tokens=keep_tokens, error_exit=error_exit)


def _place(args: argparse.Namespace, prompt: _Prompt, info: ServerInfo, cache_scope: bytes) -> _Prompt:
    """The prompt with its images in place of the placeholders. Raises ConfigError."""
    if not info.vision_digest:
        raise ConfigError(f"{args.endpoint} takes no images (its vision.mode is none); nothing was sent")
    spec = load_model_spec(args.model)
    token_ids, images = place_images(
        prompt.token_ids, prompt.files, spec=spec, vision_digest=info.vision_digest, cache_scope=cache_scope
    )
    return _Prompt(token_ids=token_ids, images=images, files=prompt.files)


def _probe(args: argparse.Namespace, run: _Run, taken: TakenOver, prompt: _Prompt) -> tuple[ProbeReport, Stage]:
    started = time.monotonic()
    # torch takes seconds to import; a plain request does without.
    from prefill_engine.decode_probe import join_components, load_probe
    from prefill_engine.vision.embed_images import embed_images
    from prefill_plan.config import RecordFormat

    assert run.outcome is not None
    usage = run.outcome.completed.usage
    probe = load_probe(
        args.model,
        record_format=RecordFormat(taken.ticket.record_format),
        keep_tokens=run.keep_tokens,
        window_rows=taken.ticket.window_rows,
    )
    replayed_hit = usage.cached_tokens if usage.replayed_tokens else None
    images = embed_images(args.model, [(image.start, image.pixels) for image in prompt.images])
    handed = join_components(taken.components, probe.state)
    report = probe.verify(handed, prompt.token_ids, replayed_hit=replayed_hit, images=images)
    stage = Stage(
        phase="PROBE",
        start_seconds=started - run.record.sent_at_seconds,
        length_seconds=time.monotonic() - started,
        note="equal to the reference" if not report.problems else "NOT EQUAL",
    )
    return report, stage


def _check_options(args: argparse.Namespace) -> None:
    if args.handoff == "push" and args.transport == "grpc":
        raise ConfigError("--handoff push needs a data transport, gRPC cannot push; nothing was sent")
    if args.handoff == "store-only" and (args.block_store is None or args.model is None):
        raise ConfigError(
            "--handoff store-only needs --block-store DIR, the engine's file store as mounted here, and --model DIR; "
            "nothing was sent"
        )
    if args.probe and args.model is None:
        raise ConfigError("--probe needs --model DIR, the checkpoint that the engine serves; nothing was sent")
    if args.image and args.model is None:
        raise ConfigError("--image needs --model DIR, whose config.json says how large images become; nothing was sent")
    if args.hit_tokens is not None and (args.hit_tokens < 0 or args.hit_tokens % BLOCK_TOKENS):
        raise ConfigError(f"--hit-tokens {args.hit_tokens}, expected a multiple of {BLOCK_TOKENS}; nothing was sent")


def _read_images(args: argparse.Namespace) -> tuple[bytes, ...]:
    """Raises ConfigError: unreadable file."""
    try:
        return tuple(path.read_bytes() for path in args.image)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}; nothing was sent") from error


def _read_prompt(args: argparse.Namespace) -> list[int]:
    """Raises ConfigError: unreadable file, not a list of ids, no tokenizer, or an empty prompt."""
    if args.token_ids is not None:
        try:
            token_ids = msgspec.json.decode(args.token_ids.read_bytes(), type=list[int])
        except OSError as error:
            raise ConfigError(f"{args.token_ids}: cannot be read: {error.strerror}; nothing was sent") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{args.token_ids}: expected a JSON array of integers: {error}; nothing was sent"
            ) from error
    else:
        token_ids = _tokenise(args.prompt_file, args.tokenizer)
    if any(not 0 <= token < 2**32 for token in token_ids):
        raise ConfigError("a token id is negative or does not fit into 32 bits; nothing was sent")
    return token_ids


def _tokenise(prompt_file: Path, tokenizer_file: Path | None) -> list[int]:
    if tokenizer_file is None:
        raise ConfigError(
            "--prompt-file needs --tokenizer FILE, the tokenizer.json of the engine's model; nothing was sent"
        )
    import tokenizers

    try:
        text = prompt_file.read_text(encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    # The tokenizers library raises bare Exception for a file it cannot parse.
    except Exception as error:
        raise ConfigError(f"{prompt_file} with {tokenizer_file}: {error}; nothing was sent") from error
    return list(tokenizer.encode(text).ids)


def _print_report(args: argparse.Namespace, report: RequestReport) -> None:
    if args.json:
        print(msgspec.json.encode(report).decode())
        return
    style: Style = TERMINAL_STYLE if sys.stdout.isatty() else PLAIN_STYLE
    print(render_timeline(report.attempt, style=style))
    if report.handoff_bytes:
        how = f"pushed to us by {report.handoff_transport}, checksums right, accepted"
        if args.handoff != "push":
            also = f" ({report.handoff_fallbacks} components by grpc: it was busy)" if report.handoff_fallbacks else ""
            how = f"read by {report.handoff_transport}{also}, checksums right, lease held"
        print(f"  hand-over  {format_bytes(report.handoff_bytes)} {how}")
    if report.stored_bytes:
        print(f"  {'':<10} {format_bytes(report.stored_bytes)} of full blocks read from the store, verified by key")
    if report.probe is not None:
        verdict, distance = describe_probe(report.probe)
        print(f"  probe      {verdict}\n  {'':<10} {distance}")
    if args.trace is not None:
        print(f"  trace      {args.trace}")


def _usage(error: ConfigError) -> int:
    print(f"prefill-engine request: {error}", file=sys.stderr)
    return 2
