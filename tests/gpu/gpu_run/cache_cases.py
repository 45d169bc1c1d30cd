"""Op cases of what moves and picks rows around the products: caches, candidates, pooled pairs, streams, ids.

Measured last: few bytes, no figure of the step hangs on them. What an op writes in place is among its outputs.
"""

from collections.abc import Callable

import torch
from gpu_run.op_case import EPS, Call, OpCase, Scale
from gpu_run.op_inputs import Maker
from torch import Tensor

from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import MhcOutput, Ops
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.shapes import OpShapes

_PAGE_ENTRIES = 64
_REPLAY_ROWS = 140
_RING_ROWS = 402
_PAIR_ROWS = 7
_FIRST_PRIME = 16_000_057
"""Of the release (model.md 2.11)."""


def cache_cases(s: OpShapes, n: Scale) -> list[OpCase]:
    """Cases of one step at these widths."""
    return [_store_main(s, n), _store_index(s, n), _pool_pairs(s, n), *_candidates(s, n), *_streams(s, n), *_ids(s, n)]


def _pages(maker: Maker, num_entries: int, *widths: int) -> list[Tensor]:
    """Sections [pages, entries, width] side by side in larger blocks, as a KV cache has them."""
    sizes = [_PAGE_ENTRIES * width for width in widths]
    blocks = torch.zeros(-(-num_entries // _PAGE_ENTRIES), sum(sizes) + 64, dtype=torch.uint8, device=maker.device)
    parts = blocks[:, : sum(sizes)].split(sizes, dim=1)
    return [part.unflatten(1, (_PAGE_ENTRIES, width)) for part, width in zip(parts, widths, strict=True)]


def _slots(maker: Maker, num_entries: int) -> Tensor:
    """From the last entry to the first; a few rows are not kept."""
    slots = torch.arange(num_entries, device=maker.device, dtype=torch.int32).flip(0)
    slots[1::97] = -1
    return slots


def _store_main(s: OpShapes, n: Scale) -> OpCase:
    width = s.head_dim // 2 + s.head_dim // 16

    def build(maker: Maker) -> Call:
        latent, slots = maker.normal(n.rows, s.head_dim, scale=3.0), _slots(maker, n.rows)
        positions = torch.arange(n.rows, device=maker.device, dtype=torch.int32) + 98_304
        angles = rope_frequencies(rope_dim=s.rope_dim, theta=160000.0, yarn=None).to(maker.device)
        pages: dict[int, Tensor] = {}

        def call(ops: Ops) -> tuple[Tensor, ...]:
            to = pages.setdefault(id(ops), _pages(maker, n.rows, width)[0])
            options = {"record_format": "fp4", "numerics": PRODUCTION}
            ops.store_main(latent, positions, angles, to, slots, **options)
            return to, ops.load_main(to, slots, **options)

        return call

    moved = n.rows * (2 * s.head_dim * 2 + 2 * width + 8)
    return OpCase(name="store_main, load_main", build=build, flops=0, bytes=moved, exact=True, priority=6)


def _store_index(s: OpShapes, n: Scale) -> OpCase:
    def build(maker: Maker) -> Call:
        keys, norm, slots = maker.normal(n.rows, s.index_dim), maker.normal(s.index_dim), _slots(maker, n.rows)
        positions = torch.arange(n.rows, device=maker.device, dtype=torch.int32) + 98_304
        angles = rope_frequencies(rope_dim=s.rope_dim, theta=160000.0, yarn=None).to(maker.device)
        pages: dict[int, list[Tensor]] = {}

        def call(ops: Ops) -> tuple[Tensor, ...]:
            data, scales = pages.setdefault(id(ops), _pages(maker, n.rows, s.index_dim // 2, s.index_dim // 32))
            ops.store_index(keys, norm, positions, angles, data, scales, slots, eps=EPS, numerics=PRODUCTION)
            rows = ops.load_index(data, scales, slots, numerics=PRODUCTION)
            return data, scales, ops.index_values(rows, numerics=PRODUCTION)

        return call

    moved = n.rows * s.index_dim * 5.1
    return OpCase(name="store_index, load_index", build=build, flops=0, bytes=moved, exact=True, priority=6)


def _pool_pairs(s: OpShapes, n: Scale) -> OpCase:
    """Three sequences: one that starts at an odd position, one of a single row that closes a pair, the rest."""

    def build(maker: Maker) -> Call:
        counts = [n.rows // 3, 1, n.rows - n.rows // 3 - 1]
        starts = [65_537, 3, 0]
        latent, score = (maker.normal(n.rows, s.head_dim, dtype=torch.float32) for _ in range(2))
        norm = maker.normal(s.head_dim)
        state = maker.normal(4, _PAIR_ROWS, 2, s.head_dim, dtype=torch.float32)
        cu_rows = [0, counts[0], counts[0] + 1, n.rows]
        vectors = [_int32(maker, values) for values in ([2, 0, 3], starts, cu_rows)]
        num_groups = sum((start + count) // 2 - start // 2 for start, count in zip(starts, counts, strict=True))

        def call(ops: Ops) -> tuple[Tensor, ...]:
            ring = state.clone()
            options = {"num_groups": num_groups, "eps": EPS, "numerics": PRODUCTION}
            return ops.pool_pairs(latent, score, norm, ring, *vectors, **options), ring

        return call

    return OpCase(name="pool_pairs", build=build, flops=0, bytes=n.rows * s.head_dim * 9.0, priority=6)


def _candidates(s: OpShapes, n: Scale) -> list[OpCase]:
    """index_select at the candidate source, and of a replay's rows inside given blocks."""
    num_rows = min(n.rows, _REPLAY_ROWS)

    def inputs(maker: Maker, ops: Ops) -> tuple[object, ...]:
        query = maker.normal(num_rows, s.index_heads, s.index_dim)
        keys, norm = maker.normal(n.entries, s.index_dim), maker.normal(s.index_dim)
        data, scales = _pages(maker, n.entries, s.index_dim // 2, s.index_dim // 32)
        positions = torch.arange(n.entries, device=maker.device, dtype=torch.int32)
        angles = rope_frequencies(rope_dim=s.rope_dim, theta=160000.0, yarn=None).to(maker.device)
        ops.store_index(keys, norm, positions, angles, data, scales, positions, eps=EPS, numerics=PRODUCTION)
        return (
            ops.index_query(query, positions[-num_rows:], angles, numerics=PRODUCTION),
            maker.normal(num_rows, s.index_heads),
            ops.load_index(data, scales, positions, numerics=PRODUCTION),
            torch.zeros(num_rows, device=maker.device, dtype=torch.int32),
            positions[-num_rows:] + 1,
        )

    def build(maker: Maker, *, is_inside: bool) -> Call:
        num_blocks = -(-n.entries // s.candidate_block)
        options = {"topk": s.index_topk, "max_visible": n.entries, "numerics": PRODUCTION}
        options |= {"candidate_block": s.candidate_block}
        if is_inside:
            options["candidates_NB"] = maker.selection(num_rows, s.candidate_blocks, num_blocks)
        else:
            options["num_candidate_blocks"] = s.candidate_blocks
        state = maker.generator.get_state()
        made: dict[int, tuple[object, ...]] = {}

        def call(ops: Ops) -> tuple[Tensor, ...]:
            if id(ops) not in made:
                maker.generator.set_state(state)  # the same values for every op set
                made[id(ops)] = inputs(maker, ops)
            picked = ops.index_select(*made[id(ops)], **options)  # type: ignore[arg-type]
            parts = (picked.entries, picked.rows, picked.candidates)
            return tuple(part for part in parts if part is not None)

        return call

    slots = min(n.entries, s.candidate_blocks * s.candidate_block)
    cases: list[tuple[str, Callable[[Maker], Call], int]] = [
        ("index_select with candidates", lambda maker: build(maker, is_inside=False), n.entries),
        ("index_select inside candidates", lambda maker: build(maker, is_inside=True), slots),
    ]
    return [
        OpCase(
            name=name,
            build=make,
            flops=2.0 * num_rows * s.index_heads * s.index_dim * seen,
            bytes=2.0 * num_rows * seen,
            mma="bf16",
            priority=6,
        )
        for name, make, seen in cases
    ]


def _streams(s: OpShapes, n: Scale) -> list[OpCase]:
    """The two ends that no turn covers, and the norm of rows."""

    def spread(maker: Maker) -> Call:
        streams, y = maker.normal(n.rows, s.streams, s.hidden), maker.normal(n.rows, s.hidden)
        post = torch.rand(n.rows, s.streams, device=maker.device, generator=maker.generator)
        comb = torch.rand(n.rows, s.streams, s.streams, device=maker.device, generator=maker.generator) / s.streams
        output = MhcOutput(y=y, post=post, comb=comb)
        return lambda ops: (ops.mhc_expand(output, streams), ops.mhc_mean(streams))

    def collapse(maker: Maker) -> Call:
        streams, norm = maker.normal(n.rows, s.streams, s.hidden), maker.normal(s.hidden)
        pre = torch.rand(n.rows, s.streams, device=maker.device, generator=maker.generator)
        options = {"output": None, "rms_eps": EPS, "numerics": PRODUCTION}

        def call(ops: Ops) -> tuple[Tensor, ...]:
            return ops.mhc_input(streams, pre, norm, **options).plain, ops.rms_norm(streams, norm, eps=EPS)

        return call

    row = 2.0 * n.rows * s.hidden
    return [
        OpCase(
            name="mhc_expand, mhc_mean", build=spread, flops=0, bytes=row * (3 * s.streams + 2), exact=True, priority=7
        ),
        OpCase(name="mhc_input, rms_norm", build=collapse, flops=0, bytes=row * (3 * s.streams + 2), priority=7),
    ]


def _ids(s: OpShapes, n: Scale) -> list[OpCase]:
    def embed(maker: Maker) -> Call:
        weight, ids = maker.normal(s.vocabulary, s.hidden), maker.integers(-1, s.vocabulary, n.rows)
        return lambda ops: (ops.embed_tokens(weight, ids, numerics=PRODUCTION),)

    def hashes(maker: Maker) -> Call:
        ids, history = (maker.integers(-1, 99_092, *shape, dtype=torch.int64) for shape in ((n.rows,), (2, 3)))
        cu_rows = _int32(maker, [0, n.rows // 3, n.rows])
        heads = torch.arange(3 * s.engram_heads, device=maker.device)
        constants = {
            "multipliers": torch.arange(4, device=maker.device) * 11_111_111_111_111 + 4_839_876_093_313,
            "primes": (_FIRST_PRIME + 2 * heads).view(3, -1),
            "offsets": heads * (_FIRST_PRIME + 99),
            "pad_id": 2,
        }
        return lambda ops: (ops.engram_hash(ids, history, cu_rows, **constants),)

    def ring(maker: Maker) -> Call:
        width, num_kept = s.head_dim + s.head_dim // 32, min(n.rows, _RING_ROWS)
        records, rings = maker.codes(n.rows, width), maker.codes(2, _RING_ROWS, width)
        records[:, s.head_dim :] = maker.exponents(n.rows, s.head_dim // 32)
        slots = torch.full((n.rows,), -1, device=maker.device, dtype=torch.int32)
        slots[n.rows - num_kept :] = torch.arange(num_kept, device=maker.device, dtype=torch.int32).flip(0)

        def call(ops: Ops) -> tuple[Tensor, ...]:
            ops.scatter_rows(rings, slots, records)
            return rings.clone(), ops.decode_window(records, numerics=PRODUCTION)

        return call

    cases = [
        ("embed_tokens", embed, 4.0 * n.rows * s.hidden),
        ("engram_hash", hashes, n.rows * (8.0 + 24 * s.engram_heads)),
        ("scatter_rows, decode_window", ring, n.rows * s.head_dim * 4.1),
    ]
    return [
        OpCase(name=name, build=build, flops=0, bytes=moved, exact=True, priority=8) for name, build, moved in cases
    ]


def _int32(maker: Maker, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=maker.device)
