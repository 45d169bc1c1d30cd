"""Hyper-connections on the chip's kernels: streams and collapse bitwise, norm and mixes within what one sum's order explains."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu import mhc
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.number_formats import quantise_fp8_ue8m0, round_trip_fp8
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import MhcMixes, MhcOutput, MhcTurn, Rows
from prefill_kernels.ref.mhc import mhc_collapse, mhc_mixes
from prefill_kernels.weights import MhcWeights
from prefill_testing.numeric import assert_bitwise, assert_close, random_tensor

HC_EPS, RMS_EPS = 1e-6, 1e-20
MIXES = ("pre", "post", "comb")
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("chip", Chip)
@pytest.mark.parametrize(
    ("num_rows", "hidden"),
    [(1, 64), (37, 96), (64, 160)],
    ids=["one row", "rows cross a tile", "columns end in a tile"],
)
def test_turn_spreads_collapses_norms_and_mixes(chip: Chip, num_rows: int, hidden: int) -> None:
    streams, pre, norm, output, weights = _inputs(num_rows, hidden)
    before = streams.clone()
    turn = _turn(streams, pre, norm, output, weights, chip)
    assert_bitwise(streams, before)
    assert_bitwise(turn.streams, ref.mhc_expand(output, streams))
    _assert_rows(turn.rows, turn.streams, pre, norm, chip)
    _assert_mixes(turn.mixes, turn.streams, weights)


def test_turn_at_the_released_width() -> None:
    streams, pre, norm, output, weights = _inputs(3, 5120)
    turn = _turn(streams, pre, norm, output, weights, Chip.SM_100)
    assert_bitwise(turn.streams, ref.mhc_expand(output, streams))
    _assert_rows(turn.rows, turn.streams, pre, norm, Chip.SM_100)
    _assert_mixes(turn.mixes, turn.streams, weights)


@pytest.mark.parametrize("chip", Chip)
def test_first_turn_has_no_output_and_keeps_its_streams(chip: Chip) -> None:
    streams, pre, norm, _, weights = _inputs(35, 96)
    before = streams.clone()
    turn = _turn(streams, pre, norm, None, weights, chip)
    assert turn.streams is streams
    assert_bitwise(streams, before)
    _assert_rows(turn.rows, streams, pre, norm, chip)
    _assert_mixes(turn.mixes, streams, weights)


@pytest.mark.parametrize("chip", Chip)
@pytest.mark.parametrize("has_output", [True, False])
def test_input_is_the_rows_of_a_turn(chip: Chip, has_output: bool) -> None:
    streams, pre, norm, output, _ = _inputs(34, 96)
    before = streams.clone()
    given = output if has_output else None
    rows = mhc.mhc_input(streams, pre, norm, output=given, rms_eps=RMS_EPS, numerics=PRODUCTION, chip=chip)
    assert_bitwise(streams, before)
    _assert_rows(rows, ref.mhc_expand(output, streams) if has_output else streams, pre, norm, chip)


def test_collapse_keeps_the_sign_of_zeros_and_a_zero_row_stays_zero() -> None:
    streams, pre, norm, _, _ = _inputs(3, 64)
    streams[1] = 0.0
    streams[2] = -0.0
    rows = mhc.mhc_input(streams, pre.abs(), norm, output=None, rms_eps=RMS_EPS, numerics=PRODUCTION, chip=Chip.SM_90)
    expected = ref.mhc_input(streams, pre.abs(), norm, output=None, rms_eps=RMS_EPS, numerics=PRODUCTION)
    assert_bitwise(rows.plain[1:], expected.plain[1:])
    assert torch.signbit(rows.plain[2]).any()


def test_mix_product_is_float32_accurate() -> None:
    """base cancels logits of about 30, so what the low bits of fn give is all that is left; a product with bfloat16 or
    two of the three pieces is off by 1e-4 and more here."""
    streams, pre, norm, _, weights = _inputs(16, 96, fn_scale=1.5)
    z = streams.flatten(1).double()
    product = z @ weights.fn.double().T * torch.rsqrt((z * z).mean(1, keepdim=True))
    assert product.abs().mean() > 10
    weights = MhcWeights(fn=weights.fn, base=-product[3].float(), scale=torch.ones(3))
    turn = _turn(streams, pre, norm, None, weights, Chip.SM_90)
    expected = mhc_mixes(streams.double(), weights, num_iters=20, hc_eps=HC_EPS, rms_eps=RMS_EPS)
    for name in MIXES:
        distance = (getattr(turn.mixes, name)[3] - getattr(expected, name)[3]).abs().max()
        assert distance < 2e-5, f"{name} is off by {distance:.1e}"


@pytest.mark.parametrize("chip", Chip)
def test_a_row_alone_is_the_row_in_a_batch(chip: Chip) -> None:
    streams, pre, norm, output, weights = _inputs(41, 96)
    whole = _turn(streams, pre, norm, output, weights, chip)
    for row in (0, 31, 32, 40):
        one = slice(row, row + 1)
        part = MhcOutput(y=output.y[one], post=output.post[one], comb=output.comb[one])
        alone = _turn(streams[one].contiguous(), pre[one], norm, part, weights, chip)
        assert_bitwise(alone.streams, whole.streams[one])
        assert_bitwise(alone.rows.plain, whole.rows.plain[one])
        for name in MIXES:
            assert_bitwise(getattr(alone.mixes, name), getattr(whole.mixes, name)[one])


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 64), (11, 288)])
def test_expand_and_mean_equal_ref(num_rows: int, hidden: int) -> None:
    streams, _, _, output, _ = _inputs(num_rows, hidden)
    assert_bitwise(mhc.mhc_expand(output, streams), ref.mhc_expand(output, streams))
    assert_bitwise(mhc.mhc_mean(streams), ref.mhc_mean(streams))


def test_no_rows_give_no_rows() -> None:
    streams, pre, norm, output, weights = _inputs(0, 64)
    turn = _turn(streams, pre, norm, output, weights, Chip.SM_100)
    assert turn.streams.shape == (0, 4, 64)
    assert turn.rows.plain.shape == (0, 64)
    assert turn.rows.scales is not None
    assert turn.rows.scales.shape == (0, 2)
    assert turn.mixes is not None
    assert turn.mixes.comb.shape == (0, 4, 4)
    assert mhc.mhc_expand(output, streams).shape == (0, 4, 64)
    assert mhc.mhc_mean(streams).shape == (0, 64)


@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 4, 64)], ids=["three streams", "float32"])
def test_other_streams_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected \[rows, 4, hidden\] bfloat16"):
        mhc.mhc_mean(torch.ones(shape))


def _inputs(
    num_rows: int, hidden: int, *, fn_scale: float = 0.2
) -> tuple[Tensor, Tensor, Tensor, MhcOutput, MhcWeights]:
    streams = random_tensor(1, num_rows, 4, hidden, dtype=torch.bfloat16, scale=3)
    pre = random_tensor(2, num_rows, 4)
    norm = random_tensor(3, hidden, dtype=torch.bfloat16)
    comb = random_tensor(4, num_rows, 4, 4).softmax(-1)
    output = MhcOutput(
        y=random_tensor(5, num_rows, hidden, dtype=torch.bfloat16), post=random_tensor(6, num_rows, 4), comb=comb
    )
    fn = random_tensor(7, 24, 4 * hidden, scale=fn_scale)
    return streams, pre, norm, output, MhcWeights(fn=fn, base=random_tensor(8, 24), scale=random_tensor(9, 3).abs())


def _turn(
    streams: Tensor, pre: Tensor, norm: Tensor, output: MhcOutput | None, weights: MhcWeights, chip: Chip
) -> MhcTurn:
    return mhc.mhc_turn(
        streams,
        pre,
        norm,
        output=output,
        weights=weights,
        num_iters=20,
        hc_eps=HC_EPS,
        rms_eps=RMS_EPS,
        numerics=PRODUCTION,
        chip=chip,
    )


def _assert_rows(rows: Rows, streams: Tensor, pre: Tensor, norm: Tensor, chip: Chip) -> None:
    """plain: at most one bfloat16 step from ref in few values (order of the sum of squares); the rest exact."""
    expected = ref.rms_norm(mhc_collapse(streams, pre), norm, eps=RMS_EPS)
    assert rows.plain.dtype == torch.bfloat16
    steps = (rows.plain.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).double().mean() <= 1e-3
    assert rows.seen is not None
    if chip is Chip.SM_90:
        assert rows.scales is None
        assert_bitwise(rows.seen, round_trip_fp8(rows.plain, dtype=torch.bfloat16))
    else:
        codes, scales = quantise_fp8_ue8m0(rows.plain)
        assert rows.scales is not None
        assert_bitwise(rows.seen, codes)
        assert_bitwise(rows.scales, scales)


def _assert_mixes(mixes: MhcMixes | None, streams: Tensor, weights: MhcWeights) -> None:
    expected = mhc_mixes(streams.double(), weights, num_iters=20, hc_eps=HC_EPS, rms_eps=RMS_EPS)
    assert mixes is not None
    for name in MIXES:
        actual = getattr(mixes, name)
        assert actual.dtype == torch.float32
        assert_close(actual, getattr(expected, name), dtype=torch.float32)
