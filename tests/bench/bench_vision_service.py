"""A VE's RPC process: rows of a screenshot to a caller on the same host, and how late its loop is while images pour in.

    python tests/bench/bench_vision_service.py [--runs N] [--seconds S]

The VE is real but for the tower: its encoder process is a fake that fills rows of the release's size (1920x1080: 968 x 5,120,
9.9 MB). Transport: per run once a plain copy of as many bytes, once by shared memory and once by the Claim stream, checksums
included, in turn, so a busy machine hits all three; ratios are taken within a run. Loop: seven callers send screenshots that no
one sent before and fetch their rows through gRPC, the dearest way for the loop. Not in the figures: a network, the tower.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

import crc32c

from prefill_engine.rpc import vision_pb2
from prefill_engine.vision.encoder_client import EncoderClient, read_shared
from prefill_testing.ve_process import VeProcess, encode_request, png, start_ve

_CALLERS = 7  # what four batches have room for
_MODEL = Path(__file__).parents[2] / "engine" / "prefill_plan" / "released_config.json"


def rows_by_shared_memory(image: vision_pb2.EncodedImage) -> bytes:
    rows = read_shared(image.region)
    assert rows is not None
    assert crc32c.crc32c(rows).to_bytes(4, "little") == image.checksum
    return rows


async def rows_by_stream(client: EncoderClient, image: vision_pb2.EncodedImage) -> bytes:
    pieces = []
    async for frame in client.stub.Claim(vision_pb2.ClaimRequest(ticket_id=image.ticket_id)):
        assert crc32c.crc32c(frame.data) == frame.crc32c
        pieces.append(frame.data)
    return b"".join(pieces)


async def measure_transport(endpoint: str, runs: int) -> None:
    async with EncoderClient(endpoint) as client:
        image = (await client.stub.Encode(encode_request(png(1920, 1080)))).image
        source = bytearray(rows_by_shared_memory(image))
        times: dict[str, list[float]] = {"copy": [], "shared memory": [], "Claim stream": []}
        for _ in range(runs):
            started = time.perf_counter()
            bytes(source)
            copied = time.perf_counter()
            shared = rows_by_shared_memory(image)
            read = time.perf_counter()
            streamed = await rows_by_stream(client, image)
            ended = time.perf_counter()
            assert shared == streamed == source
            for name, seconds in zip(times, (copied - started, read - copied, ended - read), strict=True):
                times[name].append(seconds)
        await client.stub.Ack(vision_pb2.AckRequest(ticket_id=image.ticket_id, ok=True))
    print(f"rows of a 1920x1080 screenshot, {len(source)} B, {runs} runs, median:")
    for name, values in times.items():
        ratio = statistics.median(value / copy for value, copy in zip(values, times["copy"], strict=True))
        rate = len(source) / statistics.median(values) / 1e9
        print(f"  {name:<14} {statistics.median(values) * 1e3:7.2f} ms  {rate:6.2f} GB/s  {ratio:6.2f} x copy")


async def pour(endpoint: str, picture: bytes, until: float) -> int:
    """One caller. Every request is an image of its own: bytes behind the end of a PNG change its key, not its pixels."""
    count = 0
    async with EncoderClient(endpoint) as client:
        while time.monotonic() < until:
            await client.encode(picture + secrets.token_bytes(8), use_shared_memory=False)
            count += 1
    return count


def loop_delays(encoder: VeProcess) -> dict[float, int]:
    """Upper bound in seconds -> timers that were at most so late."""
    with urllib.request.urlopen(f"http://127.0.0.1:{encoder.ready()['metrics_port']}/metrics") as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith("ve_loop_delay_seconds_bucket")]
    return {float(line.split('"')[1]): int(float(line.rpartition(" ")[2])) for line in lines}


async def measure_loop(encoder: VeProcess, seconds: float) -> None:
    picture = png(1920, 1080, seed=1)
    before = loop_delays(encoder)
    until = time.monotonic() + seconds
    counts = await asyncio.gather(*(pour(encoder.endpoint, picture, until) for _ in range(_CALLERS)))
    after = loop_delays(encoder)
    delays = {bound: after[bound] - before[bound] for bound in after}
    total = max(delays.values())
    p50, p99 = (min(bound for bound, count in delays.items() if count >= share * total) for share in (0.5, 0.99))
    print(
        f"loop of the RPC process, {_CALLERS} callers, {len(picture) / 1e6:.1f} MB each, {sum(counts) / seconds:.1f} images/s:"
    )
    print(f"  timers late by at most: p50 {p50 * 1e3:g} ms, p99 {p99 * 1e3:g} ms ({total} timers, histogram bounds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_bytes(_MODEL.read_bytes())
        settings = ("rows.memory_bytes=536870912", "rows.cache_bytes=134217728", f"decode.workers={os.cpu_count()}")
        with start_ve(Path(folder) / "ve", *settings, model=model) as encoder:
            asyncio.run(measure_transport(encoder.endpoint, args.runs))
            asyncio.run(measure_loop(encoder, args.seconds))


if __name__ == "__main__":
    main()
