"""In-engine vision: an engine encodes its images itself, gets its encoder back when it dies, and takes it along when it dies."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.client_images import place_images
from prefill_engine.decode_probe import join_components, load_probe
from prefill_engine.local_engine import LocalEngine
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import write_checkpoint
from prefill_engine.takeover import follow
from prefill_engine.vision.embed_images import embed_images
from prefill_plan.config import RecordFormat
from prefill_plan.model_spec import load_model_spec
from prefill_testing.encoded_images import encode_image, noise
from prefill_testing.serve_process import is_alive

WAIT_SECONDS = 240.0


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def encoder_pids(engine: LocalEngine, event: str) -> list[int]:
    """Of the encoders that the engine has started, oldest first."""
    lines = [json.loads(line) for line in engine.log_path.read_text().splitlines() if line.startswith("{")]
    return [line["ve_pid"] for line in lines if line["message"] == "in-engine encoder" and line["event"] == event]


def check_prompt(engine: LocalEngine, checkpoint: Path, seed: int) -> list[str]:
    """Sends a prompt with an image, takes it over, and holds it against embeddings given directly."""
    generator = random.Random(seed)
    data = encode_image(noise(150, 120, seed=seed), "PNG")
    tokens = [generator.randrange(3, 499) for _ in range(200)]
    tokens[100] = 500

    async def run() -> list[str]:
        async with PrefillClient(engine.endpoint) as client:
            info = await client.server_info()
            spec = load_model_spec(checkpoint)
            placed, images = place_images(tokens, [data], spec=spec, vision_digest=info.vision_digest)
            attempt = client.prefill(placed, PrefillOptions(images=images), timeout_seconds=WAIT_SECONDS)
            outcome = await follow(attempt, endpoint=client.endpoint)
        assert outcome.taken_over is not None
        probe = load_probe(checkpoint, record_format=RecordFormat.FP4, keep_tokens=24, window_rows=22)
        handed = join_components(outcome.taken_over.components, probe.state)
        rows = embed_images(checkpoint, [(images[0].start, data)])
        return list(probe.verify(handed, placed, replayed_hit=None, images=rows).problems)

    return asyncio.run(run())


def test_engine_with_its_own_encoder(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    texts = read_preset("tiny")
    write_checkpoint(checkpoint, check_texts(texts, source="tiny"), texts, seed=3, shard_bytes=1 << 30)
    overrides = (
        *("replay.keep_tokens=24", "kv.pool_tokens=16384", "kv.state_slots=3", "max_context_tokens=4096"),
        *("vision.mode=in-engine", "vision.rows_bytes=1048576", f"vision.image_seconds={WAIT_SECONDS}"),
    )
    with LocalEngine(checkpoint, run_dir=tmp_path, store=tmp_path / "store", overrides=overrides) as engine:
        engine.start(timeout_seconds=WAIT_SECONDS)
        assert check_prompt(engine, checkpoint, 1) == []
        (first,) = encoder_pids(engine, "ready")
        os.kill(first, signal.SIGKILL)
        # The image waits for the new one.
        assert check_prompt(engine, checkpoint, 2) == []
        second = encoder_pids(engine, "ready")[-1]
        assert second != first
        engine.kill()
        until(lambda: not is_alive(second), "the encoder outlived its engine")
