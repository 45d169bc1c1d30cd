"""Number formats, bit by bit: against golden vectors and against nearest-value search in float64."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from prefill_kernels import number_formats as quantise
from prefill_kernels.weights import DenseWeight, Fp4Weight, Fp8Weight
from prefill_testing.numeric import assert_bitwise, assert_close, random_tensor

GOLDEN_DIR = Path(__file__).parents[1] / "golden"
GOLDEN = load_file(GOLDEN_DIR / "quant_units.safetensors")
DEQUANT_SAMPLES = load_file(GOLDEN_DIR / "tiny_quant" / "cases" / "dequant_samples.safetensors")
FORMATS = {
    "fp8_ue8m0_g32": (quantise.quantise_fp8_ue8m0, quantise.dequantise_fp8_ue8m0),
    "nvfp4_e4m3_g16": (quantise.quantise_fp4_e4m3, quantise.dequantise_fp4_e4m3),
    "mxfp4_ue8m0_g32": (quantise.quantise_fp4_ue8m0, quantise.dequantise_fp4_ue8m0),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


@pytest.mark.parametrize("name", FORMATS)
def test_quantisers_equal_golden_vectors(name: str) -> None:
    encode, decode = FORMATS[name]
    codes, scales = encode(GOLDEN[f"{name}.input"])
    assert_bitwise(codes, GOLDEN[f"{name}.codes"])
    assert_bitwise(scales, GOLDEN[f"{name}.scale_bytes"])
    assert_bitwise(decode(codes, scales).bfloat16(), GOLDEN[f"{name}.dequant"])


@pytest.mark.parametrize(
    ("name", "limit", "floor"),
    [("fp8_ue8m0_g32", 448, 1e-4), ("mxfp4_ue8m0_g32", 6, 6 * 2.0**-126)],
    ids=["fp8", "fp4"],
)
def test_power_of_two_scale_is_the_smallest_that_fits(name: str, limit: float, floor: float) -> None:
    amax = _all_positive_bfloat16()
    groups = torch.zeros(amax.shape[0], 32, dtype=torch.bfloat16)
    groups[:, 5] = -amax
    _, scales = FORMATS[name][0](groups)
    mantissa, exponent = np.frexp(np.maximum(amax.double().numpy(), np.float32(floor)) / limit)
    expected = np.where(mantissa == 0.5, exponent - 1, exponent) + 127
    assert scales[:, 0].tolist() == expected.tolist()


def test_e4m3_scale_is_the_nearest_to_amax_over_six() -> None:
    amax = _all_positive_bfloat16()
    groups = torch.zeros(amax.shape[0], 16, dtype=torch.bfloat16)
    groups[:, 3] = amax
    _, scales = quantise.quantise_fp4_e4m3(groups)
    wanted = np.clip(amax.double().numpy() / 6, 2.0**-9, 448)
    assert scales[:, 0].tolist() == _nearest(wanted, E4M3).tolist()
    assert int(scales.min()) == 1
    assert int(scales.max()) == 0x7E


def test_e2m1_codes_are_nearest_with_ties_to_even() -> None:
    values = torch.cat([torch.linspace(-7, 7, 28 * 32 + 1), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    codes = quantise.e2m1_codes(values)
    assert (codes & 7).tolist() == _nearest(values.abs().double().numpy(), E2M1).tolist()
    assert (codes >> 3).tolist() == [int(value < 0) for value in values.tolist()]


def test_e4m3_codes_are_nearest_and_saturate() -> None:
    x = torch.cat([random_tensor(1, 40, 32), random_tensor(2, 40, 32, scale=1e-3), random_tensor(3, 40, 32, scale=1e4)])
    codes, scales = quantise.quantise_fp8_ue8m0(x)
    scaled = x.double() / torch.exp2(scales.double() - 127)
    assert (codes & 0x7F).tolist() == _nearest(scaled.abs().numpy(), E4M3).tolist()


def test_scale_rounded_down_clamps_the_largest_value() -> None:
    group = torch.full((1, 16), 0.1, dtype=torch.bfloat16)
    group[0, 0] = 6 * 1.06  # 1.06 is nearest to the e4m3 value 1.0
    codes, scales = quantise.quantise_fp4_e4m3(group)
    assert scales.view(torch.float8_e4m3fn).item() == 1.0
    assert codes[0, 0] == 7


def test_zero_rows_take_the_floors() -> None:
    zero = torch.zeros(1, 32)
    assert quantise.quantise_fp8_ue8m0(zero)[1].tolist() == [[105]]
    assert quantise.quantise_fp4_ue8m0(zero)[1].tolist() == [[1]]
    assert quantise.quantise_fp4_e4m3(zero)[1].tolist() == [[1, 1]]


@pytest.mark.parametrize("name", FORMATS)
def test_float64_input_is_rounded_to_float32_first(name: str) -> None:
    encode, _ = FORMATS[name]
    x = random_tensor(4, 5, 64, dtype=torch.float64)
    for wide, narrow in zip(encode(x), encode(x.float()), strict=True):
        assert_bitwise(wide, narrow)


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_is_idempotent(name: str) -> None:
    encode, decode = FORMATS[name]
    once = decode(*encode(random_tensor(5, 9, 96)))
    assert_bitwise(decode(*encode(once)), once)


@pytest.mark.parametrize("name", FORMATS)
def test_quantisers_take_no_rows(name: str) -> None:
    encode, decode = FORMATS[name]
    assert decode(*encode(torch.zeros(0, 64))).shape == (0, 64)


def test_partial_group_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot quantise 40 channels in groups of 32"):
        quantise.quantise_fp8_ue8m0(torch.zeros(2, 40))


def test_pack_puts_even_channels_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert quantise.pack_fp4(codes).tolist() == [[0x21, 0x0F]]
    assert_bitwise(quantise.unpack_fp4(quantise.pack_fp4(codes)), codes)


@pytest.mark.parametrize("shape", [(64, 96), (33, 40), (3, 64, 64), (1, 7)], ids=str)
def test_fp8_weight_tiles_match_a_loop(shape: tuple[int, ...]) -> None:
    w = random_tensor(6, *shape, dtype=torch.bfloat16)
    stored = quantise.quantise_weight_fp8(w)
    values = quantise.dequantise_weight(stored, torch.float64)
    assert stored.scale.shape == (*shape[:-2], -(-shape[-2] // 32), -(-shape[-1] // 32))
    for matrix, scales, restored in zip(
        *(t.reshape(-1, *t.shape[-2:]) for t in (w, stored.scale, values)), strict=True
    ):
        for row in range(0, shape[-2], 32):
            for column in range(0, shape[-1], 32):
                tile = matrix[row : row + 32, column : column + 32].double()
                scale = 2.0 ** np.ceil(np.log2(max(float(tile.abs().max()), 1e-4) / 448))
                assert 2.0 ** (int(scales[row // 32, column // 32]) - 127) == scale
                nearest = E4M3[_nearest((tile.abs() / scale).numpy(), E4M3)] * scale
                assert np.array_equal(restored[row : row + 32, column : column + 32].abs().numpy(), nearest)


def test_fp4_weight_round_trips() -> None:
    w = random_tensor(7, 2, 5, 96, dtype=torch.bfloat16)
    stored = quantise.quantise_weight_fp4(w)
    assert stored.data.shape == (2, 5, 48)
    assert stored.scale.shape == (2, 5, 3)
    expected = quantise.dequantise_fp4_ue8m0(*quantise.quantise_fp4_ue8m0(w))
    assert_bitwise(quantise.dequantise_weight(stored, torch.float32), expected)
    assert_close(expected, w, dtype=torch.bfloat16, factor=40)  # fp4 has one mantissa bit


@pytest.mark.parametrize("name", DEQUANT_SAMPLES)
def test_stored_weights_dequantise_as_golden(name: str) -> None:
    data, scale = _checkpoint_tensor(name), _checkpoint_tensor(name.removesuffix("weight") + "scale").view(torch.uint8)
    if data.dtype == torch.int8:
        values = quantise.dequantise_weight(Fp4Weight(data=data.view(torch.uint8), scale=scale), torch.float32)
    elif "engram.embed" in name:
        values = quantise.dequantise_fp8_ue8m0(data.view(torch.uint8), scale)
    else:
        values = quantise.dequantise_weight(Fp8Weight(data=data, scale=scale), torch.float32)
    assert_bitwise(values[:20], DEQUANT_SAMPLES[name])


def test_dense_weight_is_converted_only() -> None:
    w = random_tensor(8, 3, 4, dtype=torch.bfloat16)
    assert_bitwise(quantise.dequantise_weight(DenseWeight(data=w), torch.float32), w.float())


def test_extreme_scale_bytes_are_powers_of_two() -> None:
    values = quantise.ue8m0_to_float(torch.tensor([0, 1, 127, 254], dtype=torch.uint8))
    assert values.tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


def _checkpoint_tensor(name: str) -> Tensor:
    shards = json.loads((GOLDEN_DIR / "tiny_quant" / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(GOLDEN_DIR / "tiny_quant" / shards[name], framework="pt") as shard:
        return shard.get_tensor(name)


def _all_positive_bfloat16() -> Tensor:
    return torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)


def _nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending table, ties to the even index."""
    upper = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    below, above = x - table[upper - 1], table[upper] - x
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(take_upper, upper, upper - 1)
