"""Decision 22, bit by bit: the result of a row does not depend on the other rows of the batch nor on the row's place
in it.

Each case computes an op on a pool of 40 rows once; hypothesis then picks batches (any rows, any order, repeats) and
compares. Ops on whole sequences (pool_pairs, index_select, engram_hash) and sparse_attention have such a test in
their own files.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.number_formats import quantise_weight_fp4, quantise_weight_fp8
from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.ops import MhcOutput, Routing, Rows
from prefill_kernels.ref import mhc, records
from prefill_kernels.ref.rope import rope
from prefill_kernels.weights import DenseWeight, EngramTable, ExpertWeights, MhcWeights, Weight
from prefill_testing.numeric import FLOAT32, assert_bitwise, random_tensor
from prefill_testing.shapes import ODD

POOL_ROWS = 40
Case = Callable[[Tensor, Numerics], tuple[Tensor, ...]]


def _x(seed: int, *shape: int) -> Tensor:
    return random_tensor(seed, POOL_ROWS, *shape, scale=2)


def _linear(weight: Weight, num_in: int, *, wide: bool = False) -> Case:
    x = _x(1, num_in)
    return lambda rows, numerics: (
        ref.linear(Rows(plain=x[rows].to(numerics.activation)), weight, numerics=numerics, wide_output=wide),
    )


def _weight(seed: int, *shape: int) -> Tensor:
    return random_tensor(seed, *shape, dtype=torch.bfloat16, scale=0.3)


def _mixes(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    num_mixes = 2 * ODD.streams + ODD.streams**2
    weights = MhcWeights(
        fn=random_tensor(3, num_mixes, ODD.streams * ODD.hidden, scale=0.05),
        base=random_tensor(4, num_mixes),
        scale=random_tensor(5, 3),
    )
    mixes = mhc.mhc_mixes(
        _x(2, ODD.streams, ODD.hidden)[rows].to(numerics.activation),
        weights,
        num_iters=20,
        hc_eps=1e-6,
        rms_eps=1e-20,
    )
    return mixes.pre, mixes.post, mixes.comb


def _streams(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    streams = _x(2, ODD.streams, ODD.hidden)[rows].to(numerics.activation)
    pre, post, comb = _x(6, ODD.streams)[rows], _x(7, ODD.streams)[rows], _x(8, ODD.streams, ODD.streams)[rows]
    y = _x(9, ODD.hidden)[rows].to(numerics.activation)
    output = MhcOutput(y=y, post=post, comb=comb)
    return mhc.mhc_collapse(streams, pre), ref.mhc_expand(output, streams), ref.mhc_mean(streams)


def _norm(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    x = _x(10, ODD.q_lora)[rows].to(numerics.activation)
    return (ref.rms_norm(x, random_tensor(11, ODD.q_lora), eps=1e-20),)


def _grouped(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    x = _x(12, ODD.o_groups, 192)[rows].to(numerics.activation)
    weight = quantise_weight_fp8(_weight(13, ODD.o_groups * ODD.o_lora, 192))
    return (ref.grouped_linear(x, weight, numerics=numerics).plain,)


def _rope(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    x = _x(14, ODD.heads, ODD.head_dim)[rows].to(numerics.activation)
    positions = torch.arange(POOL_ROWS, dtype=torch.int32)[rows] * 31
    return (rope(x, positions, torch.rand(8, generator=torch.Generator().manual_seed(1))),)


def _records(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    kv = _x(15, ODD.head_dim)[rows].to(numerics.activation)
    window = records.encode_window(kv, numerics=numerics)
    main = records.encode_main(kv, record_format="fp4", numerics=numerics)
    data, scales = records.encode_index(kv, numerics=numerics)
    return (
        window,
        main,
        data,
        scales,
        records.decode_window(window, numerics=numerics),
        records.decode_main(main, record_format="fp4", numerics=numerics),
        records.decode_index(data, scales, numerics=numerics),
        records.quantise_index_query(kv.unsqueeze(1), numerics=numerics),
    )


def _route(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    routing = ref.route(
        _x(16, ODD.hidden)[rows].to(numerics.activation),
        _weight(17, ODD.experts, ODD.hidden),
        random_tensor(18, ODD.experts),
        random_tensor(19, ODD.experts),
        (torch.arange(POOL_ROWS) % 3 == 0)[rows],
        topk=ODD.experts_per_token,
        scaling=1.5,
        numerics=numerics,
    )
    return routing.expert_ids, routing.weights


def _experts(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    x = _x(20, ODD.hidden)[rows].to(numerics.activation)
    ids = _x(21, ODD.experts).argsort(1)[:, : ODD.experts_per_token].sort(1).values.int()
    routing = Routing(expert_ids=ids[rows], weights=_x(22, ODD.experts_per_token).abs()[rows])
    w1, w3 = (_weight(seed, ODD.experts, ODD.moe_inter, ODD.hidden) for seed in (23, 24))
    w2 = _weight(25, ODD.experts, ODD.hidden, ODD.moe_inter)
    routed = ref.routed_experts(
        Rows(plain=x),
        routing,
        ExpertWeights(w1=quantise_weight_fp4(w1), w3=quantise_weight_fp4(w3), w2=quantise_weight_fp4(w2)),
        first_expert=0,
        swiglu_limit=3.0,
        numerics=numerics,
    )
    one = ExpertWeights(w1=quantise_weight_fp8(w1[0]), w3=quantise_weight_fp8(w3[0]), w2=quantise_weight_fp8(w2[0]))
    shared = ref.shared_expert(Rows(plain=x), one, swiglu_limit=3.0, numerics=numerics)
    return routed, shared, ref.combine_experts(routed, shared)


def _engram(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    table = EngramTable(data=_weight(26, 64, ODD.engram_dim), scale=None)
    index = torch.randint(0, 64, (POOL_ROWS, 6), generator=torch.Generator().manual_seed(2))
    embedded = ref.engram_lookup(table, index[rows], numerics=numerics).plain
    out, gates = ref.engram_gate(
        _x(27, ODD.streams, ODD.hidden)[rows].to(numerics.activation),
        _x(28, (ODD.streams + 1) * ODD.hidden)[rows].to(numerics.activation),
        _weight(29, ODD.streams, ODD.hidden),
        _weight(30, ODD.streams, ODD.hidden),
        (torch.arange(POOL_ROWS) % 5 == 0)[rows],
        rms_eps=1e-20,
    )
    return embedded, out, gates


def _embedding_and_head(rows: Tensor, numerics: Numerics) -> tuple[Tensor, ...]:
    ids = torch.arange(-2, POOL_ROWS - 2, dtype=torch.int32)[rows]
    h = ref.embed_tokens(_weight(31, POOL_ROWS - 4, ODD.hidden), ids, numerics=numerics)
    return h, ref.lm_head(h, DenseWeight(data=_weight(32, ODD.vocabulary, ODD.hidden)), numerics=numerics)


CASES: dict[str, Case] = {
    "mhc_mixes": _mixes,
    "mhc_streams": _streams,
    "rms_norm": _norm,
    "linear_dense": _linear(DenseWeight(data=_weight(40, 3, ODD.hidden)), ODD.hidden),
    "linear_dense_long": _linear(DenseWeight(data=_weight(41, 24, 1024)), 1024, wide=True),
    "linear_fp8": _linear(quantise_weight_fp8(_weight(42, ODD.q_lora, ODD.hidden)), ODD.hidden),
    "linear_fp8_wide": _linear(quantise_weight_fp8(_weight(43, 1030, 320)), 320),
    "linear_fp4": _linear(quantise_weight_fp4(_weight(44, 50, 64)), 64),
    "grouped_linear": _grouped,
    "rope": _rope,
    "records": _records,
    "route": _route,
    "experts": _experts,
    "engram": _engram,
    "embedding_and_head": _embedding_and_head,
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("numerics", [FLOAT32, PRODUCTION], ids=["float32", "production"])
@pytest.mark.parametrize("name", CASES)
def test_row_is_the_same_in_any_batch(name: str, numerics: Numerics) -> None:
    _check_batches(CASES[name], numerics, num_examples=15)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["mhc_mixes", "linear_dense_long", "linear_fp8_wide", "rms_norm"])
def test_row_is_the_same_in_any_batch_with_two_threads(name: str) -> None:
    _check_batches(CASES[name], PRODUCTION, num_examples=3)


def _check_batches(case: Case, numerics: Numerics, *, num_examples: int) -> None:
    whole = case(torch.arange(POOL_ROWS), numerics)

    @settings(max_examples=num_examples, deadline=None, database=None)
    @given(rows=st.lists(st.integers(0, POOL_ROWS - 1), max_size=50))
    def check(rows: list[int]) -> None:
        index = torch.tensor(rows, dtype=torch.int64)
        for actual, expected in zip(case(index, numerics), whole, strict=True):
            assert_bitwise(actual, expected[index])

    check()
