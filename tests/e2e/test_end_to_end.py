"""An engine of real processes on loopback, tiny model, file store: requests, hits, replay, hand-off, cancel, bad input."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from tokenizers import Tokenizer

from prefill_engine.__main__ import main
from prefill_engine.client import PrefillAttempt, PrefillClient, PrefillOptions, block_keys_of
from prefill_engine.decode_probe import DecodeProbe, join_components, load_probe
from prefill_engine.local_engine import LocalEngine
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import write_checkpoint
from prefill_engine.takeover import Outcome, follow, take_over
from prefill_engine.timeline import Accepted, ChunkDone, StoreState, TicketOffered, last_event
from prefill_plan.config import RecordFormat
from prefill_plan.errors import CallFailed, PeerError

T = TypeVar("T")
KEEP = 24
WINDOW = 16
ROLLBACK = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    texts = read_preset("tiny")
    write_checkpoint(directory, check_texts(texts, source="tiny"), texts, seed=3, shard_bytes=1 << 30)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    run_dir = tmp_path_factory.mktemp("engine")
    overrides = (
        f"replay.keep_tokens={KEEP}",
        "kv.pool_tokens=16384",
        "kv.state_slots=3",
        "max_context_tokens=4096",
        # Small chunks, so that a request has several steps to be cancelled between.
        "scheduler.chunk_cap_tokens=512",
        "scheduler.min_chunk_tokens=128",
    )
    with LocalEngine(checkpoint, run_dir=run_dir, store=run_dir / "store", overrides=overrides) as running:
        running.start(timeout_seconds=120.0)
        yield running


@pytest.fixture(scope="module")
def probe(checkpoint: Path) -> DecodeProbe:
    return load_probe(checkpoint, record_format=RecordFormat.FP4, keep_tokens=KEEP, window_rows=WINDOW + ROLLBACK)


def prompt(name: str, length: int) -> list[int]:
    """Prompts of one name are prefixes of each other."""
    generator = random.Random(name)
    return [generator.randrange(3, 499) for _ in range(length)]


def call(engine: LocalEngine, scenario: Callable[[PrefillClient], Awaitable[T]]) -> T:
    async def run() -> T:
        async with PrefillClient(engine.endpoint) as client:
            return await scenario(client)

    return asyncio.run(run())


def send(engine: LocalEngine, tokens: Sequence[int], options: PrefillOptions) -> tuple[PrefillAttempt, Outcome]:
    async def scenario(client: PrefillClient) -> tuple[PrefillAttempt, Outcome]:
        attempt = client.prefill(tokens, options, timeout_seconds=60.0)
        return attempt, await follow(attempt, endpoint=client.endpoint)

    return call(engine, scenario)


def send_and_probe(engine: LocalEngine, probe: DecodeProbe, tokens: Sequence[int]) -> tuple[int, int, tuple[str, ...]]:
    """Cached and replayed tokens, and what the probe found wrong."""
    _, outcome = send(engine, tokens, PrefillOptions(store="required"))
    assert outcome.taken_over is not None
    usage = outcome.completed.usage
    handed = join_components(outcome.taken_over.components, probe.state)
    report = probe.verify(handed, tokens, replayed_hit=usage.cached_tokens if usage.replayed_tokens else None)
    return usage.cached_tokens, usage.replayed_tokens, report.problems


@pytest.mark.parametrize("length", [1, 23, 129, 700])
def test_cold_prompt_is_handed_over_right(engine: LocalEngine, probe: DecodeProbe, length: int) -> None:
    assert send_and_probe(engine, probe, prompt(f"cold {length}", length)) == (0, 0, ())


def test_hit_with_local_snapshot_is_handed_over_right(engine: LocalEngine, probe: DecodeProbe) -> None:
    first = send_and_probe(engine, probe, prompt("conversation", 300))
    second = send_and_probe(engine, probe, prompt("conversation", 417))
    assert (first, second) == ((0, 0, ()), (256, 0, ()))


def test_events_tell_the_story_in_order(engine: LocalEngine) -> None:
    attempt, outcome = send(engine, prompt("story", 650), PrefillOptions(store="required"))
    record = attempt.record("story")
    accepted, chunk = last_event(record, Accepted), last_event(record, ChunkDone)
    assert [event.seq for event in attempt.events] == list(range(1, len(attempt.events) + 1))
    assert accepted is not None
    assert (accepted.effective_hit, accepted.replay_rows, accepted.compute_rows) == (0, 0, 650)
    assert chunk is not None
    assert (chunk.rows_done, chunk.rows_total) == (650, 650)
    assert outcome.completed.store == StoreState(
        blocks_committed=5, blocks_total=5, blocks_failed=0, snapshots=(512, 640)
    )
    assert outcome.completed.handoff is not None
    assert outcome.completed.handoff.state == "DELIVERED"


def test_request_without_hand_off_has_no_ticket_and_frees_everything(engine: LocalEngine) -> None:
    attempt, outcome = send(engine, prompt("canary", 200), PrefillOptions(handoff=False, store="skip"))
    assert outcome.taken_over is None
    assert last_event(attempt.record("canary"), TicketOffered) is None


def test_offered_hit_is_an_upper_bound(engine: LocalEngine) -> None:
    tokens = prompt("bounded", 500)
    send(engine, tokens, PrefillOptions(store="required"))
    info = call(engine, PrefillClient.server_info)
    keys = block_keys_of(info, tokens, cache_scope=b"")
    hits = [
        send(engine, tokens, PrefillOptions(hit_keys=allowed))[1].completed.usage.cached_tokens
        for allowed in (keys[:1], (), None)
    ]
    assert hits == [128, 0, 384]


def test_another_cache_scope_hits_nothing(engine: LocalEngine) -> None:
    tokens = prompt("scopes", 300)
    send(engine, tokens, PrefillOptions(cache_scope=b"a" * 32))
    _, other = send(engine, tokens, PrefillOptions(cache_scope=b"b" * 32))
    _, same = send(engine, tokens, PrefillOptions(cache_scope=b"a" * 32))
    assert (other.completed.usage.cached_tokens, same.completed.usage.cached_tokens) == (0, 256)


def test_cancelled_request_ends_with_its_reason_and_the_next_one_works(engine: LocalEngine, probe: DecodeProbe) -> None:
    async def scenario(client: PrefillClient) -> tuple[str, str, str]:
        attempt = client.prefill(prompt("cancelled", 4000), PrefillOptions(), timeout_seconds=60.0)
        result = ""
        try:
            async for event in attempt:
                if isinstance(event.body, ChunkDone) and not result:
                    result = await client.cancel(attempt.attempt_id, wait_drained=True)
        except CallFailed as error:
            return result, error.status, error.reason
        return result, "OK", ""

    assert call(engine, scenario) == ("CANCELLED", "CANCELLED", "CALLER_CANCELLED")
    assert send_and_probe(engine, probe, prompt("after cancel", 150)) == (0, 0, ())


def test_only_one_peer_wins_a_ticket(engine: LocalEngine) -> None:
    async def scenario(client: PrefillClient) -> tuple[int, str]:
        attempt = client.prefill(prompt("contested", 130), PrefillOptions(), timeout_seconds=60.0)
        outcomes: list[object] = []
        async for event in attempt:
            if isinstance(event.body, TicketOffered):
                assert attempt.ticket is not None
                peers = (take_over(attempt.ticket, endpoint=client.endpoint) for _ in range(2))
                outcomes = list(await asyncio.gather(*peers, return_exceptions=True))
        failures = [outcome for outcome in outcomes if isinstance(outcome, CallFailed)]
        return len(failures), failures[0].reason

    count, reason = call(engine, scenario)
    assert count == 1
    assert reason in ("TICKET_CLAIMED", "TICKET_GONE")


@pytest.mark.parametrize(
    ("tokens", "status", "reason"),
    [
        ([], "INVALID_ARGUMENT", "TOKENS_INVALID"),
        ([1, 2, 512], "INVALID_ARGUMENT", "TOKENS_INVALID"),
        ([5] * 4097, "OUT_OF_RANGE", "PROMPT_TOO_LONG"),
    ],
    ids=["empty", "unknown id", "too long"],
)
def test_bad_prompt_is_refused_and_the_engine_stays_up(
    engine: LocalEngine, tokens: list[int], status: str, reason: str
) -> None:
    with pytest.raises(CallFailed) as caught:
        send(engine, tokens, PrefillOptions())
    assert (caught.value.status, caught.value.reason, caught.value.retry) == (status, reason, "NEVER")
    _, outcome = send(engine, [7, 8, 9], PrefillOptions(handoff=False))
    assert outcome.completed.usage.prompt_tokens == 3


def request(engine: LocalEngine, *arguments: object) -> int:
    return main(["request", "--endpoint", engine.endpoint, *(str(argument) for argument in arguments)])


def test_request_verb_prints_a_timeline_and_verifies(
    engine: LocalEngine, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt_file, trace = tmp_path / "prompt.txt", tmp_path / "trace.json"
    prompt_file.write_text("A prefill engine computes the KV of a prompt. " * 20)
    code = request(
        engine,
        "--prompt-file",
        prompt_file,
        "--tokenizer",
        checkpoint / "tokenizer.json",
        "--probe",
        "--model",
        checkpoint,
        "--trace",
        trace,
    )
    text = capsys.readouterr().out
    assert code == 0
    assert text.startswith("request: rank 0, prompt ")
    assert "  compute " in text
    assert "bit for bit" in text
    assert text.isascii()
    names = {event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]}
    assert {"compute", "hand-off", "probe", "first token"} <= names


def test_request_verb_prints_json(engine: LocalEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(prompt("json", 140)))
    code = request(engine, "--token-ids", ids, "--handoff", "pull", "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["ok"] is True
    assert report["handoff_bytes"] > 0
    assert report["attempt"]["events"][-1]["body"]["usage"]["prompt_tokens"] == 140


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("[1, 2, 999999]", (), "TOKENS_INVALID"),
        ("[1, 2, -1]", (), "negative"),
        ("not json", (), "expected a JSON array of integers"),
        ("[1, 2]", ("--probe",), "--probe needs --model"),
        ("[1, 2]", ("--hit-tokens", "100"), "expected a multiple of 128"),
    ],
    ids=["unknown id", "negative id", "no list", "probe without model", "odd hit"],
)
def test_request_verb_exits_2_for_a_wrong_request(
    engine: LocalEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(content)
    code = request(engine, "--token-ids", ids, *arguments)
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.out + captured.err


def test_request_verb_exits_1_when_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[1, 2]")
    code = main(["request", "--endpoint", "127.0.0.1:1", "--token-ids", str(ids)])
    assert code == 1
    assert "UNAVAILABLE" in capsys.readouterr().out


def test_text_survives_the_tokenizer_of_the_presets(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = "Prefill: 100,000 tokens, \u00e9\u4e2d\U0001f600.\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) > 10


def test_engine_without_a_model_says_so(tmp_path: Path) -> None:
    with (
        LocalEngine(tmp_path / "absent", run_dir=tmp_path, store=tmp_path / "store", overrides=()) as engine,
        pytest.raises(PeerError, match="exit code 11 before it was ready") as caught,
    ):
        engine.start(timeout_seconds=60.0)
    assert "absent" in str(caught.value)


def test_hit_from_the_store_is_replayed_after_a_restart(engine: LocalEngine, probe: DecodeProbe) -> None:
    """The last test of the file: it restarts the engine that all share."""
    before = send_and_probe(engine, probe, prompt("restarted", 300))
    engine.kill()
    engine.start(timeout_seconds=120.0)
    after = send_and_probe(engine, probe, prompt("restarted", 450))
    assert (before, after) == ((0, 0, ()), (256, WINDOW, ()))
    assert engine.stop(timeout_seconds=60.0) == 0
