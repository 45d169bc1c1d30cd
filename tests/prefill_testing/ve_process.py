"""`prefill-engine ve serve` as a real process, with the tiny tower or a fake encoder; and images to send it."""

import io
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from prefill_engine.rpc import vision_pb2

TINY_VISION = Path(__file__).parents[1] / "golden" / "tiny_vision"
FAKE_ENCODER = "prefill_testing.fake_tower:fake_encoder_main"
_START = "import sys; from prefill_engine.__main__ import main; sys.exit(main())"
_WAIT_SECONDS = 60.0
_GATE = "gate"


@dataclass(slots=True)
class VeProcess:
    """A running VE. Use as a context manager; it is killed at the end if it still runs."""

    process: "subprocess.Popen[str]"
    folder: Path

    def __enter__(self) -> "VeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def ready(self) -> dict[str, object]:
        """Ports and pids, once it is ready."""
        path = self.folder / "ready.json"
        self._wait_for(path.exists, "not ready")
        return json.loads(path.read_text())

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.ready()['port']}"

    def worker_pids(self, count: int = 1) -> list[int]:
        """Of the decode workers that got ready, oldest first; waits until there were that many."""
        pids: list[int] = []

        def are_enough() -> bool:
            pids[:] = [int(str(line["worker_pid"])) for line in self.log("decode worker ready")]
            return len(pids) >= count

        self._wait_for(are_enough, f"no {count} decode workers")
        return pids

    def log(self, message: str) -> list[dict[str, object]]:
        """Log lines with this message so far."""
        lines = [json.loads(line) for line in self.stderr().splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["message"] == message]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(timeout=_WAIT_SECONDS)

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def termination(self) -> dict[str, object]:
        return json.loads((self.folder / "termination").read_bytes())

    def _wait_for(self, condition: object, text: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not condition():  # type: ignore[operator]
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline, text
            time.sleep(0.02)


def start_gated_ve(folder: Path, *settings: str) -> VeProcess:
    """A VE whose encoder answers no batch while `closed_gate` is entered."""
    folder.mkdir(exist_ok=True)
    return start_ve(folder, *settings, fault=f"gate={folder / _GATE}")


@contextmanager
def closed_gate(encoder: VeProcess) -> Iterator[None]:
    """No batch ends in here."""
    gate = encoder.folder / _GATE
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


def start_ve(
    folder: Path,
    *settings: str,
    fault: str = "",
    real: bool = False,
    activation: str = "bf16",
    model: Path = TINY_VISION,
) -> VeProcess:
    """Starts a VE on free ports with one decode worker. settings: of --set. real: the model's tower, not the fake encoder."""
    folder.mkdir(exist_ok=True)
    (folder / "termination").touch()
    ours = (
        *("device=cpu", "ops=ref", f"activation={activation}", "model.name=tiny", "decode.workers=1"),
        *("server.port=0", "server.metrics_port=0", "server.probe_port=0", "server.drain_seconds=5"),
        *("rows.memory_bytes=16777216", "rows.cache_bytes=8388608", *settings),
    )
    command = [sys.executable, "-c", _START, "ve", "serve", "--model", str(model), "--fault", fault]
    command += [word for setting in ours for word in ("--set", setting)]
    command += ["--ready-file", str(folder / "ready.json"), "--termination-log", str(folder / "termination")]
    command += [] if real else ["--encoder-entry", FAKE_ENCODER]
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, "PLAN_HASH": "plan-7"}
        )
    return VeProcess(process, folder)


def png(width: int, height: int, *, seed: int = 0) -> bytes:
    """Noise, so no two seeds give the same bytes."""
    pixels = np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def encode_request(image: bytes, **fields: object) -> vision_pb2.EncodeRequest:
    """A request with an item id of its own."""
    return vision_pb2.EncodeRequest(**{"item_id": secrets.token_bytes(16), "data": image, **fields})  # type: ignore[arg-type]
