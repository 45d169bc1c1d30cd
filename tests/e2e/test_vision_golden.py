"""The golden images through a real VE, in both activations: PNG -> decode worker -> tower -> shared memory or stream -> rows."""

import asyncio
import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prefill_engine.vision.encoder_client import EncodedRows, EncoderClient
from prefill_testing.ve_process import TINY_VISION, VeProcess, start_ve

IMAGES = tuple(json.loads((TINY_VISION / "manifest.json").read_text())["images"])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VeProcess]]:
    folder = tmp_path_factory.mktemp("ve")
    with start_ve(folder / "fp32", real=True, activation="fp32") as fp32, start_ve(folder / "bf16", real=True) as bf16:
        yield {"fp32": fp32, "bf16": bf16}


def encode(encoder: VeProcess, name: str, *, use_shared_memory: bool) -> EncodedRows:
    async def run() -> EncodedRows:
        async with EncoderClient(encoder.endpoint) as client:
            data = (TINY_VISION / "images" / f"{name}.png").read_bytes()
            return await client.encode(data, use_shared_memory=use_shared_memory)

    return asyncio.run(run())


def difference(encoded: EncodedRows, name: str) -> np.ndarray:
    expected = load_file(TINY_VISION / "cases" / f"{name}.safetensors")["span"].float()
    rows = torch.frombuffer(bytearray(encoded.rows), dtype=DTYPES[encoded.image.dtype]).float()
    assert (encoded.image.tokens, encoded.image.columns) == tuple(expected.shape)
    return (rows.view(expected.shape) - expected).abs().numpy()


@pytest.mark.parametrize("name", IMAGES)
def test_golden_rows_come_back(encoders: dict[str, VeProcess], name: str) -> None:
    exact = encode(encoders["fp32"], name, use_shared_memory=True)
    assert exact.transport == "shm"
    assert difference(exact, name).max() < 1e-4
    again = encode(encoders["fp32"], name, use_shared_memory=False)
    assert (again.transport, again.rows, again.image.from_cache) == ("stream", exact.rows, True)
    rounded = difference(encode(encoders["bf16"], name, use_shared_memory=True), name)
    assert rounded.max() < 0.2
    assert np.quantile(rounded, 0.99) < 0.1
    assert rounded.mean() < 0.03
