"""One case per op: inputs, the call, and what it moves and computes. Checked against `ref` at a few rows, timed at many.

flops and bytes are the minimum of perf.md 2: inputs and outputs once, no padding.
"""

import torch
from gpu_run.cache_cases import cache_cases
from gpu_run.op_case import EPS, Call, OpCase, Scale
from gpu_run.op_inputs import Maker
from torch import Tensor

from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import IndexRows, MhcOutput, Ops, Routing, Rows
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.shapes import OpShapes


def op_cases(s: OpShapes, n: Scale) -> list[OpCase]:
    """Every op of the protocol that the step runs, by priority."""
    cases = [*_products(s, n), *_experts(s, n), *_attention(s, n), *_index(s, n), *_streams(s, n), *_rows(s, n)]
    cases += cache_cases(s, n)
    return sorted(cases, key=lambda case: case.priority)


def quantised(ops: Ops, x: Tensor) -> Rows:
    """x in the form the op set under test reads."""
    return ops.quantise_rows(x, numerics=PRODUCTION)


def _linear(name: str, n: Scale, num_in: int, num_out: int, *, priority: int = 4) -> OpCase:
    def build(maker: Maker) -> Call:
        x, weight = maker.normal(n.rows, num_in), maker.fp8(num_out, num_in)
        made: dict[int, Rows] = {}
        return lambda ops: (ops.linear(made.setdefault(id(ops), quantised(ops, x)), weight, numerics=PRODUCTION),)

    moved = n.rows * (num_in + 2 * num_out) + num_out * num_in
    return OpCase(
        name=f"linear {name}",
        build=build,
        flops=2.0 * n.rows * num_in * num_out,
        bytes=moved,
        mma="fp8",
        priority=priority,
    )


def _products(s: OpShapes, n: Scale) -> list[OpCase]:
    group_in = s.heads * s.head_dim // s.o_groups

    def pair(maker: Maker) -> Call:
        x = maker.normal(n.rows, s.hidden)
        first, second = maker.fp8(s.q_lora, s.hidden), maker.fp8(s.head_dim, s.hidden)
        made: dict[int, Rows] = {}
        return lambda ops: ops.linear_pair(
            made.setdefault(id(ops), quantised(ops, x)), first, second, numerics=PRODUCTION
        )

    def grouped(maker: Maker) -> Call:
        x, weight = maker.normal(n.rows, s.o_groups, group_in), maker.fp8(s.o_groups * s.o_lora, group_in)
        return lambda ops: (ops.grouped_linear(x, weight, numerics=PRODUCTION).plain,)

    def head(maker: Maker) -> Call:
        h, weight = maker.normal(1, s.hidden), maker.dense(s.vocabulary, s.hidden)
        return lambda ops: (ops.lm_head(h, weight, numerics=PRODUCTION),)

    width, o_width = s.q_lora + s.head_dim, s.o_groups * s.o_lora
    return [
        OpCase(
            name="linear_pair wq_a wkv",
            build=pair,
            flops=2.0 * n.rows * s.hidden * width,
            bytes=n.rows * (s.hidden + 2 * width) + s.hidden * width,
            mma="fp8",
            priority=4,
        ),
        _linear("wq_b", n, s.q_lora, s.heads * s.head_dim, priority=3),
        _linear("wo_b", n, o_width, s.hidden, priority=3),
        _linear("indexer wq_b", n, s.q_lora, s.index_heads * s.index_dim),
        OpCase(
            name="grouped_linear wo_a",
            build=grouped,
            flops=2.0 * n.rows * group_in * o_width,
            bytes=n.rows * (2 * s.heads * s.head_dim + 3 * o_width) + group_in * o_width,
            mma="bf16",
            priority=3,
        ),
        OpCase(
            name="lm_head",
            build=head,
            flops=2.0 * s.hidden * s.vocabulary,
            bytes=2.0 * s.hidden * s.vocabulary,
            mma="bf16",
            priority=7,
        ),
    ]


def _experts(s: OpShapes, n: Scale) -> list[OpCase]:
    pairs = n.rows * s.experts_per_token
    per_expert = 3 * s.hidden * s.moe_inter * 17 / 32

    def routed(maker: Maker) -> Call:
        x, experts = maker.normal(n.rows, s.hidden), maker.experts(n.experts, s.hidden, s.moe_inter)
        ids = maker.routing_ids(n.rows, s.experts_per_token, n.experts)
        weights = torch.rand(ids.shape, device=maker.device, generator=maker.generator)
        routing = Routing(expert_ids=ids, weights=weights)
        made: dict[int, Rows] = {}
        return lambda ops: (
            ops.routed_experts(
                made.setdefault(id(ops), quantised(ops, x)),
                routing,
                experts,
                first_expert=0,
                swiglu_limit=10.0,
                numerics=PRODUCTION,
            ),
        )

    def shared(maker: Maker) -> Call:
        x, expert = maker.normal(n.rows, s.hidden), maker.shared_expert(s.hidden, s.moe_inter)
        made: dict[int, Rows] = {}
        return lambda ops: (
            ops.shared_expert(
                made.setdefault(id(ops), quantised(ops, x)), expert, swiglu_limit=10.0, numerics=PRODUCTION
            ),
        )

    def combine(maker: Maker) -> Call:
        slots, out = maker.normal(n.rows, s.experts_per_token, s.hidden), maker.normal(n.rows, s.hidden)
        return lambda ops: (ops.combine_experts(slots, out),)

    def route(maker: Maker) -> Call:
        x, gate = maker.normal(n.rows, s.hidden), maker.dense(s.experts, s.hidden).data
        bias = maker.normal(s.experts, scale=0.1, dtype=torch.float32)
        is_image = maker.integers(0, 2, n.rows).bool()
        options = {"topk": s.experts_per_token, "scaling": 2.5, "numerics": PRODUCTION}

        def call(ops: Ops) -> tuple[Tensor, ...]:
            routing = ops.route(x, gate, bias, -bias, is_image, **options)
            return routing.expert_ids, routing.weights

        return call

    moved = pairs * (s.hidden + 2 * s.hidden) + n.experts * per_expert
    return [
        OpCase(
            name="routed_experts",
            build=routed,
            flops=6.0 * pairs * s.hidden * s.moe_inter,
            bytes=moved,
            mma="fp8",
            priority=0,
        ),
        OpCase(
            name="shared_expert",
            build=shared,
            flops=6.0 * n.rows * s.hidden * s.moe_inter,
            bytes=3.0 * n.rows * s.hidden + 3 * s.hidden * s.moe_inter,
            mma="fp8",
            priority=4,
        ),
        OpCase(name="combine_experts", build=combine, flops=0, bytes=2.0 * (pairs + 2 * n.rows) * s.hidden, exact=True),
        OpCase(
            name="route",
            build=route,
            flops=2.0 * n.rows * s.hidden * s.experts,
            bytes=2.0 * n.rows * s.hidden,
            mma="bf16",
        ),
    ]


def _attention(s: OpShapes, n: Scale) -> list[OpCase]:
    frequencies = rope_frequencies(rope_dim=s.rope_dim, theta=160000.0, yarn=None)

    def attend(maker: Maker, *, has_entries: bool) -> Call:
        query, sink = maker.normal(n.rows, s.heads, s.head_dim), maker.normal(s.heads, dtype=torch.float32)
        keys, index = maker.normal(s.window + n.rows, s.head_dim), maker.window_index(n.rows, s.window)
        entries = maker.normal(n.entries, s.head_dim) if has_entries else None
        chosen = maker.selection(n.rows, s.index_topk, n.entries) if has_entries else None
        positions = torch.arange(n.rows, device=maker.device, dtype=torch.int32) + 98304
        angles = frequencies.to(maker.device)
        return lambda ops: (
            ops.sparse_attention(
                query,
                positions,
                angles,
                keys,
                index,
                entries,
                chosen,
                sink,
                scale=s.head_dim**-0.5,
                numerics=PRODUCTION,
            ),
        )

    def window(maker: Maker) -> Call:
        kv, weight = maker.normal(n.rows, s.head_dim), maker.normal(s.head_dim)
        ring = maker.codes(2, 402, s.head_dim + s.head_dim // 32)
        ring[..., s.head_dim :] = 118
        slots = torch.arange(s.window, device=maker.device, dtype=torch.int32)
        positions, angles = torch.arange(n.rows, device=maker.device, dtype=torch.int32), frequencies.to(maker.device)

        def call(ops: Ops) -> tuple[Tensor, ...]:
            made = ops.window_rows(kv, weight, positions, angles, ring, slots, eps=EPS, numerics=PRODUCTION)
            return made.records, made.keys

        return call

    def cases(name: str, num_keys: int, priority: int, *, has_entries: bool) -> OpCase:
        per_row = 2 * s.heads * s.head_dim * 2 + 2 * num_keys * s.head_dim
        return OpCase(
            name=name,
            build=lambda maker: attend(maker, has_entries=has_entries),
            flops=4.0 * n.rows * s.heads * s.head_dim * num_keys,
            bytes=float(n.rows * per_row),
            mma="bf16",
            priority=priority,
        )

    return [
        cases("sparse_attention", s.window + s.index_topk, 1, has_entries=True),
        cases("sparse_attention window only", s.window, 4, has_entries=False),
        OpCase(name="window_rows", build=window, flops=0, bytes=n.rows * s.head_dim * 5.1, exact=True),
    ]


def _index(s: OpShapes, n: Scale) -> list[OpCase]:
    frequencies = rope_frequencies(rope_dim=s.rope_dim, theta=160000.0, yarn=None)

    def select(maker: Maker) -> Call:
        query, key = maker.normal(n.rows, s.index_heads, s.index_dim), maker.normal(n.entries, s.index_dim)
        weight, scales = maker.normal(s.index_heads, dtype=torch.float32), maker.normal(n.rows, s.index_heads)
        positions, angles = torch.zeros(n.rows, device=maker.device, dtype=torch.int32), frequencies.to(maker.device)
        data = torch.zeros(1, n.entries, s.index_dim // 2, device=maker.device, dtype=torch.uint8)
        scale = torch.zeros(1, n.entries, s.index_dim // 32, device=maker.device, dtype=torch.uint8)
        slots = torch.arange(n.entries, device=maker.device, dtype=torch.int32)
        start = torch.zeros(n.rows, device=maker.device, dtype=torch.int32)
        visible = torch.clamp(torch.arange(n.rows, device=maker.device) + n.entries - n.rows + 1, min=1).int()
        norm, at = maker.normal(s.index_dim), torch.zeros(n.entries, device=maker.device, dtype=torch.int32)
        made: dict[int, tuple[IndexRows, IndexRows]] = {}

        def call(ops: Ops) -> tuple[Tensor, ...]:
            if id(ops) not in made:
                ops.store_index(key, norm, at, angles, data, scale, slots, eps=EPS, numerics=PRODUCTION)
                rows = ops.index_query(query, positions, angles, numerics=PRODUCTION)
                made[id(ops)] = (rows, ops.load_index(data, scale, slots, numerics=PRODUCTION))
            rows, keys = made[id(ops)]
            picked = ops.index_select(
                rows, scales, keys, start, visible, topk=s.index_topk, max_visible=n.entries, numerics=PRODUCTION
            )
            return picked.entries, picked.rows

        assert weight.numel() == s.index_heads
        return call

    return [
        OpCase(
            name="index_select",
            build=select,
            flops=2.0 * n.rows * s.index_heads * s.index_dim * n.entries,
            bytes=2.0 * n.rows * n.entries,
            mma="bf16",
            priority=2,
        )
    ]


def _streams(s: OpShapes, n: Scale) -> list[OpCase]:
    mixing = {"num_iters": 20, "hc_eps": 1e-6, "rms_eps": EPS, "numerics": PRODUCTION}

    def turn(maker: Maker) -> Call:
        streams, weights, norm = (
            maker.normal(n.rows, s.streams, s.hidden),
            maker.mhc(s.streams, s.hidden),
            maker.normal(s.hidden),
        )
        pre, post = (torch.rand(n.rows, s.streams, device=maker.device, generator=maker.generator) for _ in range(2))
        comb = torch.rand(n.rows, s.streams, s.streams, device=maker.device, generator=maker.generator) / s.streams
        output = MhcOutput(y=maker.normal(n.rows, s.hidden), post=post, comb=comb)

        def call(ops: Ops) -> tuple[Tensor, ...]:
            made = ops.mhc_turn(streams, pre, norm, output=output, weights=weights, **mixing)
            return made.streams, made.rows.plain, made.mixes.pre, made.mixes.post, made.mixes.comb

        return call

    def gate(maker: Maker) -> Call:
        streams, kv = maker.normal(n.rows, s.streams, s.hidden), maker.normal(n.rows, (s.streams + 1) * s.hidden)
        query, key = maker.normal(s.streams, s.hidden), maker.normal(s.streams, s.hidden)
        is_image = maker.integers(0, 2, n.rows).bool()
        return lambda ops: ops.engram_gate(streams, kv, query, key, is_image, rms_eps=EPS)

    moved = n.rows * s.hidden * 2.0 * (2 * s.streams + 1 + 1.5)
    return [
        OpCase(name="mhc_turn", build=turn, flops=2.0 * n.rows * 24 * s.streams * s.hidden, bytes=moved, priority=4),
        OpCase(
            name="engram_gate", build=gate, flops=0, bytes=n.rows * s.hidden * 2.0 * (3 * s.streams + 1), priority=6
        ),
    ]


def _rows(s: OpShapes, n: Scale) -> list[OpCase]:
    def norm(maker: Maker) -> Call:
        x, weight = maker.normal(n.rows, s.q_lora), maker.normal(s.q_lora)
        return lambda ops: (ops.norm_rows(x, weight, eps=EPS, numerics=PRODUCTION).plain,)

    def lookup(maker: Maker) -> Call:
        table = maker.engram(100_000, s.engram_dim)
        index = maker.integers(0, 100_000, n.rows, 3 * s.engram_heads, dtype=torch.int64)
        return lambda ops: (ops.engram_lookup(table, index, numerics=PRODUCTION).plain,)

    def gather(maker: Maker) -> Call:
        x, index = maker.normal(n.rows, s.streams * s.hidden), maker.integers(-1, n.rows, 140)
        return lambda ops: (ops.gather_rows(x, index),)

    width = 3 * s.engram_heads * s.engram_dim
    return [
        OpCase(name="norm_rows", build=norm, flops=0, bytes=n.rows * s.q_lora * 5.1),
        OpCase(name="engram_lookup", build=lookup, flops=0, bytes=n.rows * width * 4.1, exact=True, priority=6),
        OpCase(
            name="gather_rows", build=gather, flops=0, bytes=140 * s.streams * s.hidden * 4.0, exact=True, priority=8
        ),
    ]
