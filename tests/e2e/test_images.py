"""Prompts with images through real processes: two vision encoders, an engine, a client; equal to embeddings given directly.

And when an encoder hangs or is killed, or the engine over a pull: answered all the same, and nothing of it stays anywhere.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from prefill_engine.__main__ import main
from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.client_images import PromptImage, place_images
from prefill_engine.decode_probe import DecodeProbe, join_components, load_probe
from prefill_engine.local_engine import LocalEngine
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import write_checkpoint
from prefill_engine.probe_report import ProbeReport
from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.rpc.convert import to_duration
from prefill_engine.takeover import Outcome, follow
from prefill_engine.timeline import ImageReady
from prefill_engine.vision.embed_images import embed_images
from prefill_engine.vision.encoder_client import open_encoder_channel
from prefill_engine.vision.slab import SHM_DIR, remove_orphans
from prefill_plan.config import RecordFormat
from prefill_plan.errors import CallFailed, PeerError
from prefill_plan.model_spec import load_model_spec
from prefill_testing.encoded_images import encode_image, noise
from prefill_testing.ve_process import VeProcess, start_ve

KEEP, WINDOW, ROLLBACK = 24, 16, 6
IMAGE_TOKEN = 500
START_SECONDS = 240.0
IMAGE_SECONDS = 4.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    texts = read_preset("tiny")
    write_checkpoint(directory, check_texts(texts, source="tiny"), texts, seed=3, shard_bytes=1 << 30)
    return directory


@pytest.fixture(scope="module")
def encoders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VeProcess]]:
    """Two of them, ready."""
    folders = [tmp_path_factory.mktemp(name) for name in ("ve-0", "ve-1")]
    with (
        start_ve(folders[0], model=checkpoint, real=True) as first,
        start_ve(folders[1], model=checkpoint, real=True) as second,
    ):
        for encoder in (first, second):
            encoder.ready()
        yield [first, second]


@pytest.fixture(scope="module")
def engine(
    checkpoint: Path, encoders: list[VeProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    with engine_of(checkpoint, encoders, tmp_path_factory.mktemp("engine")) as running:
        running.start(timeout_seconds=START_SECONDS)
        yield running


def engine_of(checkpoint: Path, encoders: Sequence[VeProcess], run_dir: Path) -> LocalEngine:
    endpoints = json.dumps([encoder.endpoint for encoder in encoders])
    overrides = (
        f"replay.keep_tokens={KEEP}",
        "kv.pool_tokens=16384",
        "kv.state_slots=3",
        "max_context_tokens=4096",
        "scheduler.chunk_cap_tokens=512",
        "scheduler.min_chunk_tokens=128",
        "vision.mode=remote",
        f"vision.endpoints={endpoints}",
        "vision.rows_bytes=1048576",
        f"vision.image_seconds={IMAGE_SECONDS}",
    )
    return LocalEngine(checkpoint, run_dir=run_dir, store=run_dir / "store", overrides=overrides)


@pytest.fixture(scope="module")
def probe(checkpoint: Path) -> DecodeProbe:
    return load_probe(checkpoint, record_format=RecordFormat.FP4, keep_tokens=KEEP, window_rows=WINDOW + ROLLBACK)


def picture(seed: int) -> bytes:
    """All of them make the same number of tokens."""
    return encode_image(noise(150, 120, seed=seed), "PNG")


def prompt_of(name: str, *, length: int = 400, places: Sequence[int] = (200, 300)) -> list[int]:
    generator = random.Random(name)
    tokens = [generator.randrange(3, 499) for _ in range(length)]
    for place in places:
        tokens[place] = IMAGE_TOKEN
    return tokens


class Sent:
    """A prompt with images that went to an engine and was taken over."""

    def __init__(self, tokens: list[int], images: tuple[PromptImage, ...], outcome: Outcome, events: tuple) -> None:
        self.tokens = tokens
        self.images = images
        self.outcome = outcome
        self.events = events

    def verify(self, probe: DecodeProbe, checkpoint: Path, files: Sequence[bytes]) -> ProbeReport:
        """The handed bytes against a run with embeddings given directly, bit by bit."""
        taken = self.outcome.taken_over
        assert taken is not None
        spans = embed_images(checkpoint, [(i.start, f) for i, f in zip(self.images, files, strict=True)])
        usage = self.outcome.completed.usage
        replayed = usage.cached_tokens if usage.replayed_tokens else None
        handed = join_components(taken.components, probe.state)
        return probe.verify(handed, self.tokens, replayed_hit=replayed, images=spans)

    @property
    def images_ready(self) -> list[int]:
        return sorted(event.body.index for event in self.events if isinstance(event.body, ImageReady))


async def send(
    engine: LocalEngine, checkpoint: Path, tokens: list[int], files: Sequence[bytes], *, without_pixels: bool = False
) -> Sent:
    async with PrefillClient(engine.endpoint) as client:
        info = await client.server_info()
        placed, images = place_images(tokens, files, spec=load_model_spec(checkpoint), vision_digest=info.vision_digest)
        if without_pixels:
            images = tuple(
                PromptImage(
                    start=i.start,
                    tokens=i.tokens,
                    width=i.width,
                    height=i.height,
                    content_key=i.content_key,
                    pixels=b"",
                )
                for i in images
            )
        attempt = client.prefill(placed, PrefillOptions(images=images), timeout_seconds=60.0)
        outcome = await follow(attempt, endpoint=client.endpoint)
        return Sent(placed, images, outcome, tuple(attempt.events))


@asynccontextmanager
async def stub_of(encoder: VeProcess) -> AsyncIterator[vision_pb2_grpc.VisionEncoderStub]:
    async with open_encoder_channel(encoder.endpoint) as channel:
        yield vision_pb2_grpc.VisionEncoderStub(channel)


async def until_load(encoder: VeProcess, holds: Callable[[vision_pb2.VisionLoad], bool]) -> None:
    async with stub_of(encoder) as stub, asyncio.timeout(60):
        async for report in stub.WatchLoad(vision_pb2.VisionWatchRequest(period=to_duration(0.05))):
            if holds(report):
                return


def is_empty(report: vision_pb2.VisionLoad) -> bool:
    return report.images_queued == 0 and report.tickets_open == 0


def test_two_images_through_encoders_equal_embeddings_given_directly_and_the_next_turn_asks_nobody(
    engine: LocalEngine, encoders: list[VeProcess], checkpoint: Path, probe: DecodeProbe
) -> None:
    files = [picture(1), picture(2)]

    async def run() -> tuple[Sent, Sent]:
        first = await send(engine, checkpoint, prompt_of("a"), files)
        for encoder in encoders:
            await until_load(encoder, is_empty)
        # The same turn and more text, as an agent sends it; the front door sends no pixels of what it believes in the hit.
        again = await send(engine, checkpoint, prompt_of("a") + [7] * 150, files, without_pixels=True)
        return first, again

    first, again = asyncio.run(run())
    assert first.images_ready == [0, 1]
    assert first.verify(probe, checkpoint, files).problems == ()
    usage = again.outcome.completed.usage
    assert usage.cached_tokens >= 384
    assert again.images_ready == []
    assert again.verify(probe, checkpoint, files).problems == ()


def test_damaged_image_is_the_callers_fault_with_its_index(engine: LocalEngine, checkpoint: Path) -> None:
    whole = picture(3)
    damaged = whole[: len(whole) // 2]
    with pytest.raises(CallFailed) as caught:
        asyncio.run(send(engine, checkpoint, prompt_of("damaged"), [whole, damaged]))
    assert (caught.value.status, caught.value.reason) == ("INVALID_ARGUMENT", "IMAGE_REJECTED")
    assert "image 1" in caught.value.message


def test_request_shows_the_images_in_its_timeline(
    engine: LocalEngine, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(picture(30))
    (tmp_path / "ids.json").write_text(json.dumps(prompt_of("cli", places=(200,))))
    arguments = ["request", "--endpoint", engine.endpoint, "--token-ids", str(tmp_path / "ids.json")]
    arguments += ["--model", str(checkpoint)]
    assert main([*arguments, "--image", str(tmp_path / "a.png"), "--probe"]) == 0
    shown = capsys.readouterr().out
    assert "of 1 image from the vision encoder" in shown
    assert "bit for bit" in shown
    assert main([*arguments, "--image", str(tmp_path / "a.png"), "--image", str(tmp_path / "a.png")]) == 2
    assert "1 image placeholders" in capsys.readouterr().err


def test_encoder_hangs_then_one_dies_then_the_engine_dies(
    engine: LocalEngine, encoders: list[VeProcess], checkpoint: Path, probe: DecodeProbe
) -> None:
    """Last in the file, since it wears out what the others use."""
    places = (50, 150, 250, 350)
    for number, fault in enumerate((signal.SIGSTOP, signal.SIGKILL)):
        files = [picture(100 + 10 * number + i) for i in range(4)]
        tokens = prompt_of(f"f{number}", places=places)
        sent, doomed = asyncio.run(send_into_fault(engine, checkpoint, tokens, files, encoders, fault))
        assert sent.images_ready == [0, 1, 2, 3]
        assert sent.verify(probe, checkpoint, files).problems == ()
        assert num_retries(engine) > number
        if fault == signal.SIGSTOP:
            os.kill(doomed.process.pid, signal.SIGCONT)
            asyncio.run(until_load(doomed, is_empty))
    (left,) = (encoder for encoder in encoders if encoder is not doomed)
    asyncio.run(kill_engine_while(engine, checkpoint, left, places))
    asyncio.run(until_load(left, is_empty))
    # Its rows lay in shared memory, which the next start of anything removes; that of the living encoder stays.
    assert any(".pe." in name for name in remove_orphans())
    slabs = [path.name for path in SHM_DIR.glob("prefill-ve.*") if f".{left.process.pid}." in path.name]
    assert len(slabs) == 2


def num_retries(engine: LocalEngine) -> int:
    return engine.log_path.read_text().count("image is tried again")


@contextmanager
def standing_towers(encoders: Sequence[VeProcess]) -> Iterator[None]:
    """Images that come meanwhile stay where they are sent to."""
    pids = [int(str(encoder.ready()["encoder_pid"])) for encoder in encoders]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def first_with_images(encoders: Sequence[VeProcess]) -> VeProcess:
    watches = {asyncio.ensure_future(until_load(each, lambda load: load.images_queued > 0)): each for each in encoders}
    done, others = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    first = done.pop()
    first.result()
    return watches[first]


async def until_usable(engine: LocalEngine, count: int) -> None:
    async with asyncio.timeout(60):
        while (await asyncio.to_thread(engine.figures)).get("pe_encoders_usable") != count:
            await asyncio.sleep(0.05)


async def send_into_fault(
    engine: LocalEngine,
    checkpoint: Path,
    tokens: list[int],
    files: Sequence[bytes],
    encoders: Sequence[VeProcess],
    fault: signal.Signals,
) -> tuple[Sent, VeProcess]:
    """Sends images that nobody has seen; an encoder that has some of them gets the signal, and the other goes on."""
    await until_usable(engine, len(encoders))
    for encoder in encoders:
        await until_load(encoder, is_empty)
    with standing_towers(encoders):
        sending = asyncio.create_task(send(engine, checkpoint, tokens, files))
        doomed = await first_with_images(encoders)
        os.kill(doomed.process.pid, fault)
    return await sending, doomed


async def kill_engine_while(engine: LocalEngine, checkpoint: Path, encoder: VeProcess, places: Sequence[int]) -> None:
    """Kills the engine while its images are at an encoder that stands still, which then goes on."""
    with standing_towers([encoder]):
        files = [picture(140 + i) for i in range(4)]
        sending = asyncio.create_task(send(engine, checkpoint, prompt_of("k", places=places), files))
        await first_with_images([encoder])
        engine.kill()
        with pytest.raises((CallFailed, PeerError)):
            await sending
