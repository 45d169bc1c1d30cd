"""A VE's RPC process: rows of a screenshot to a caller on the same host, and how late its loop is while images pour in.

    python tests/bench/bench_vision_service.py [--runs N] [--seconds S] [--results FILE]

The VE is real but for the tower: its encoder process is a fake that fills rows of the release's size (1920x1080: 968 x 5,120,
9.9 MB). Transport: per run once a plain copy of as many bytes, once by shared memory and once by the Claim stream, checksums
included, in turn, so a busy machine hits all three; ratios are taken within a run. Loop: callers send screenshots that no one
sent before and fetch their rows through gRPC, the dearest way for the loop; full load is seven callers and a decode worker per
CPU. Once with fewer busy processes than cores and once beside processes that take every core, to tell the loop's own delay from
that of a machine without a free core. Not in the figures: a network, the tower.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import crc32c

from prefill_engine.rpc import vision_pb2
from prefill_engine.vision.encoder_client import EncoderClient, read_shared
from prefill_testing.bench_results import machine_line, write_section
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


async def measure_transport(endpoint: str, runs: int) -> list[str]:
    async with EncoderClient(endpoint) as client:
        image = (await client.stub.Encode(encode_request(png(1920, 1080)))).image
        source = bytearray(rows_by_shared_memory(image))
        times: dict[str, list[float]] = {"plain copy": [], "shared memory": [], "Claim stream": []}
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
    lines = [
        f"| rows of a 1920x1080 screenshot, {len(source)} B, {runs} runs | median ms | GB/s | times a plain copy |"
    ]
    lines.append("| --- | --- | --- | --- |")
    for name, values in times.items():
        ratio = spread([value / copy for value, copy in zip(values, times["plain copy"], strict=True)])
        median = statistics.median(values)
        lines.append(f"| {name} | {median * 1e3:.2f} | {len(source) / median / 1e9:.2f} | {ratio} |")
    return lines


def spread(values: list[float]) -> str:
    """Median, p20 and p80."""
    deciles = statistics.quantiles(values, n=10)
    return f"{deciles[4]:.2f} ({deciles[1]:.2f}, {deciles[7]:.2f})"


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


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_loop(encoder: VeProcess, seconds: float, *, callers: int, name: str) -> str:
    """A table row."""
    picture = png(1920, 1080, seed=1)
    before, cpu = loop_delays(encoder), cpu_seconds(encoder.process.pid)
    until = time.monotonic() + seconds
    counts = await asyncio.gather(*(pour(encoder.endpoint, picture, until) for _ in range(callers)))
    after, cpu = loop_delays(encoder), cpu_seconds(encoder.process.pid) - cpu
    delays = {bound: after[bound] - before[bound] for bound in after}
    total = max(delays.values())
    p50, p99 = (min(bound for bound, count in delays.items() if count >= share * total) for share in (0.5, 0.99))
    return f"| {name} | {sum(counts) / seconds:.1f} | {cpu / seconds:.2f} | <= {p50 * 1e3:g} ms | <= {p99 * 1e3:g} ms | {total} |"


def start(folder: Path, model: Path, *, workers: int) -> VeProcess:
    settings = ("rows.memory_bytes=536870912", "rows.cache_bytes=134217728", f"decode.workers={workers}")
    return start_ve(folder, *settings, model=model)


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """So many processes that compute and never wait."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def measure(folder: Path, *, runs: int, seconds: float) -> list[str]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_bytes(_MODEL.read_bytes())
    cpus = os.cpu_count() or 1
    loop = ["| loop of the RPC process | images/s | its CPUs | timers late, p50 | p99 | timers |"]
    loop.append("| --- | --- | --- | --- | --- | --- |")
    with start(folder / "small", model, workers=1) as encoder:
        loop.append(asyncio.run(measure_loop(encoder, seconds, callers=1, name="1 caller, 1 decode worker")))
    with start(folder / "full", model, workers=cpus) as encoder:
        transport = asyncio.run(measure_transport(encoder.endpoint, runs))
        name = f"full load: {_CALLERS} callers, {cpus} decode workers"
        loop.append(asyncio.run(measure_loop(encoder, seconds, callers=_CALLERS, name=name)))
        with busy_cores(cpus):
            name = f"the same beside {cpus} busy processes"
            loop.append(asyncio.run(measure_loop(encoder, seconds, callers=_CALLERS, name=name)))
    return [*transport, "", *loop]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="write the section into this Markdown file as well"
    )
    args = parser.parse_args()
    where = machine_line()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(Path(folder), runs=args.runs, seconds=args.seconds)
    text = [f"`tests/bench/bench_vision_service.py`, {where}. Ratios within a run: median (p20, p80).", "", *lines]
    text += ["", "Delays are upper bounds of `ve_loop_delay_seconds`; the callers, too, run on these CPUs."]
    print("\n".join(text))
    if args.results is not None:
        write_section(args.results, "A VE's RPC process", text, heading="Vision: benchmarks")


if __name__ == "__main__":
    main()
