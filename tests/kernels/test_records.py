import pytest
import torch

from prefill_kernels import number_formats as quantise
from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.ref import records as ref
from prefill_testing.numeric import BFLOAT16, CHECKED_QUANT, FLOAT32, assert_bitwise, fraction_equal, random_tensor

QUANTISED = [PRODUCTION, CHECKED_QUANT]


@pytest.mark.parametrize("numerics", QUANTISED, ids=["production", "checked"])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_window_record_is_codes_then_scales(numerics: Numerics, num_rows: int) -> None:
    kv = random_tensor(1, num_rows, 96, dtype=numerics.activation)
    codes, scales = quantise.quantise_fp8_ue8m0(kv)
    records = ref.encode_window(kv, numerics=numerics)
    assert_bitwise(records, torch.cat([codes, scales], dim=1))
    expected = quantise.dequantise_fp8_ue8m0(codes, scales).to(numerics.activation)
    assert_bitwise(ref.decode_window(records, numerics=numerics), expected)


@pytest.mark.parametrize("numerics", QUANTISED, ids=["production", "checked"])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_main_fp4_record_is_nibbles_then_scales(numerics: Numerics, num_rows: int) -> None:
    kv = random_tensor(2, num_rows, 48, dtype=numerics.activation)
    codes, scales = quantise.quantise_fp4_e4m3(kv)
    records = ref.encode_main(kv, record_format="fp4", numerics=numerics)
    assert records.shape == (num_rows, 24 + 3)
    assert_bitwise(records[:, :24], codes[:, 0::2] + 16 * codes[:, 1::2])
    assert_bitwise(records[:, 24:], scales)
    expected = quantise.dequantise_fp4_e4m3(codes, scales).to(numerics.activation)
    assert_bitwise(ref.decode_main(records, record_format="fp4", numerics=numerics), expected)


def test_main_fp8_record_is_the_window_record() -> None:
    kv = random_tensor(3, 4, 64, dtype=torch.bfloat16)
    records = ref.encode_main(kv, record_format="fp8", numerics=PRODUCTION)
    assert_bitwise(records, ref.encode_window(kv, numerics=PRODUCTION))
    decoded = ref.decode_main(records, record_format="fp8", numerics=PRODUCTION)
    assert_bitwise(decoded, ref.decode_window(records, numerics=PRODUCTION))


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_index_record_keeps_data_and_scales_apart(num_rows: int) -> None:
    key = random_tensor(4, num_rows, 64, dtype=torch.bfloat16)
    data, scales = ref.encode_index(key, numerics=PRODUCTION)
    assert data.shape == (num_rows, 32)
    assert scales.shape == (num_rows, 2)
    expected = quantise.dequantise_fp4_ue8m0(*quantise.quantise_fp4_ue8m0(key)).bfloat16()
    assert_bitwise(ref.decode_index(data, scales, numerics=PRODUCTION), expected)


def test_released_record_sizes() -> None:
    kv, key = random_tensor(5, 2, 512, dtype=torch.bfloat16), random_tensor(6, 2, 128, dtype=torch.bfloat16)
    assert ref.encode_window(kv, numerics=PRODUCTION).shape == (2, 528)
    assert ref.encode_main(kv, record_format="fp4", numerics=PRODUCTION).shape == (2, 288)
    data, scales = ref.encode_index(key, numerics=PRODUCTION)
    assert (data.shape[1], scales.shape[1]) == (64, 4)


def test_index_query_takes_the_key_format() -> None:
    query = random_tensor(7, 3, 4, 32, dtype=torch.bfloat16)
    out = ref.quantise_index_query(query, numerics=PRODUCTION)
    data, scales = ref.encode_index(query.flatten(0, 1), numerics=PRODUCTION)
    assert_bitwise(out.flatten(0, 1), ref.decode_index(data, scales, numerics=PRODUCTION))
    assert fraction_equal(out, query) < 0.5


@pytest.mark.parametrize("numerics", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_raw_records_are_the_rows_themselves(numerics: Numerics) -> None:
    kv = random_tensor(8, 3, 48, dtype=numerics.activation)
    for records in (
        ref.encode_window(kv, numerics=numerics),
        ref.encode_main(kv, record_format="fp4", numerics=numerics),
        ref.quantise_index_query(kv, numerics=numerics),
        ref.encode_index(kv, numerics=numerics)[0],
    ):
        assert_bitwise(records, kv)
    assert_bitwise(ref.decode_window(kv.double(), numerics=numerics), kv)
    assert_bitwise(ref.decode_main(kv.double(), record_format="fp4", numerics=numerics), kv)
    assert_bitwise(ref.decode_index(kv.double(), kv.new_empty(3, 0), numerics=numerics), kv)


def test_unknown_record_format_is_refused() -> None:
    with pytest.raises(ValueError, match="record format is 'fp5'"):
        ref.encode_main(torch.zeros(1, 32), record_format="fp5", numerics=PRODUCTION)
