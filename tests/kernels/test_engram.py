"""Engram hash, lookup and gate; the hash also against the golden table rows."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.ref import engram_gate, engram_hash, engram_lookup
from prefill_kernels.weights import EngramTable
from prefill_testing.numeric import (
    ALL_NUMERICS,
    CHECKED_QUANT,
    FLOAT32,
    assert_bitwise,
    assert_close,
    random_tensor,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_dense"
# The release's first layer (model.md 2.11): large multipliers and primes.
MULTIPLIERS = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
PRIMES = torch.tensor([[16000057, 16000079], [16000189, 16000207], [16000339, 16000381]])
OFFSETS = torch.tensor([0, 16000057, 32000136, 48000325, 64000532, 80000871])
PAD = 77


@pytest.mark.parametrize("case", ["text_200", "boseos", "image"])
def test_hash_equals_golden_rows(case: str) -> None:
    meta = json.loads((GOLDEN / "engram_meta.json").read_text())
    tensors = load_file(GOLDEN / "cases" / f"{case}.safetensors")
    ids = torch.tensor(meta["token_map"])[tensors["input_ids"].long()]
    if "token_types" in tensors:
        ids[tensors["token_types"] >= 0] = -1
    for layer in range(2):
        primes = torch.tensor(meta["primes"][layer]).view(3, 2)
        rows = engram_hash(
            ids,
            torch.full((1, 3), -1),
            torch.tensor([0, len(ids)]),
            multipliers=torch.tensor(meta["multipliers"][layer]),
            primes=primes,
            offsets=torch.tensor(meta["offsets"][layer]),
            pad_id=meta["pad_compressed_id"],
        )
        assert rows.dtype == torch.int64
        assert rows.tolist() == tensors["hash_ids"][:, layer].tolist()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_batch_hashes_like_a_loop(data: st.DataObject) -> None:
    token = st.one_of(st.integers(0, 99091), st.just(-1))
    sequences = data.draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, len(ids))) for ids in sequences]
    ends = [data.draw(st.integers(start, len(ids))) for start, ids in zip(starts, sequences, strict=True)]
    history = [([-1, -1, -1, *ids])[start : start + 3] for start, ids in zip(starts, sequences, strict=True)]
    chunk = [ids[s:e] for ids, s, e in zip(sequences, starts, ends, strict=True)]
    rows = _hash(chunk, history)
    expected = [_slow_rows(ids, p) for ids, s, e in zip(sequences, starts, ends, strict=True) for p in range(s, e)]
    assert rows.tolist() == expected


def test_no_sequences_hash_nothing() -> None:
    assert _hash([], []).shape == (0, 6)


@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
def test_lookup_concatenates_dequantised_rows(numerics: Numerics) -> None:
    codes = torch.randint(0, 0x7E, (40, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    scales = torch.randint(118, 130, (40, 2), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    table = EngramTable(data=codes.view(torch.float8_e4m3fn), scale=scales)
    rows = torch.tensor([[3, 39, 0], [7, 7, 12]])
    out = engram_lookup(table, rows, numerics=numerics).plain
    assert out.dtype == numerics.activation
    values = codes.view(torch.float8_e4m3fn).double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    assert_bitwise(out.double(), torch.stack([torch.cat([values[r] for r in row]) for row in rows.tolist()]))


def test_dense_table_is_gathered() -> None:
    table = EngramTable(data=random_tensor(3, 9, 5, dtype=torch.bfloat16), scale=None)
    out = engram_lookup(table, torch.tensor([[8, 0]]), numerics=FLOAT32).plain
    assert_bitwise(out, torch.cat([table.data[8], table.data[0]]).float().unsqueeze(0))


def test_lookup_of_no_rows_is_empty() -> None:
    table = EngramTable(data=torch.ones(4, 8, dtype=torch.bfloat16), scale=None)
    assert engram_lookup(table, torch.empty(0, 3, dtype=torch.int64), numerics=PRODUCTION).plain.shape == (0, 24)


@pytest.mark.parametrize("numerics", [*ALL_NUMERICS.values(), CHECKED_QUANT], ids=[*ALL_NUMERICS, "checked"])
def test_gate_matches_a_loop(numerics: Numerics) -> None:
    streams, kv, query_weight, key_weight = _gate_inputs(11, numerics)
    is_image = torch.arange(11) % 4 == 2
    before = streams.clone()
    out, gates = engram_gate(streams, kv, query_weight, key_weight, is_image, rms_eps=1e-20)
    assert_bitwise(streams, before)
    assert (out.dtype, gates.dtype) == (numerics.activation, numerics.wide)
    for n in range(11):
        if is_image[n]:
            assert gates[n].abs().max() == 0
            assert_bitwise(out[n], streams[n])
            continue
        value = kv[n, 4 * 20 :].double()
        for s in range(4):
            x, key = streams[n, s].double(), kv[n, 20 * s : 20 * (s + 1)].double()
            dot = float((x * query_weight[s].double() * key_weight[s].double() * key).sum())
            dot /= math.sqrt(float((x * x).mean()) + 1e-20) * math.sqrt(float((key * key).mean()) + 1e-20)
            dot *= 20**-0.5
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
            assert math.isclose(float(gates[n, s]), gate, rel_tol=1e-5 if numerics.wide == torch.float32 else 1e-11)
            assert_close(out[n, s], x + gate * value, dtype=numerics.activation)


def test_gate_of_zero_streams_is_at_the_floor() -> None:
    _, kv, query_weight, key_weight = _gate_inputs(2, FLOAT32)
    streams = torch.zeros(2, 4, 20)
    _, gates = engram_gate(streams, kv, query_weight, key_weight, torch.zeros(2, dtype=torch.bool), rms_eps=1e-20)
    assert torch.allclose(gates, torch.full((2, 4), 1 / (1 + math.exp(-1e-3))))


def _hash(chunk: list[list[int]], history: list[list[int]]) -> Tensor:
    cu_rows = torch.tensor([0, *(len(ids) for ids in chunk)]).cumsum(0).int()
    flat = torch.tensor([i for ids in chunk for i in ids], dtype=torch.int64)
    past = torch.tensor(history, dtype=torch.int64).reshape(len(history), 3)
    return engram_hash(flat, past, cu_rows, multipliers=MULTIPLIERS, primes=PRIMES, offsets=OFFSETS, pad_id=PAD)


def _slow_rows(ids: list[int], position: int) -> list[int]:
    tokens, blocked = [], False
    for back in range(4):
        token = ids[position - back] if position >= back else -1
        blocked = blocked or token < 0
        tokens.append(PAD if blocked else token)
    value, rows = tokens[0] * int(MULTIPLIERS[0]), []
    for i in range(1, 4):
        value ^= tokens[i] * int(MULTIPLIERS[i])
        rows += [int(OFFSETS[2 * (i - 1) + k]) + value % int(PRIMES[i - 1, k]) for k in range(2)]
    return rows


def _gate_inputs(num_rows: int, numerics: Numerics) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams = random_tensor(4, num_rows, 4, 20, dtype=numerics.activation, scale=2)
    kv = random_tensor(5, num_rows, 5 * 20, dtype=numerics.activation)
    return streams, kv, random_tensor(6, 4, 20, dtype=torch.bfloat16), random_tensor(7, 4, 20, dtype=torch.bfloat16)
