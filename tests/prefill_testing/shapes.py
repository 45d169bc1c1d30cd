"""Sizes that op tests and benchmarks run at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShapes:
    """The widths of one model that ops see; counts of rows and entries are each test's choice."""

    hidden: int
    streams: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_block: int
    candidate_blocks: int
    experts: int
    experts_per_token: int
    moe_inter: int
    vocabulary: int
    engram_heads: int
    engram_dim: int


RELEASED = OpShapes(
    hidden=5120,
    streams=4,
    heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora=1280,
    o_groups=8,
    o_lora=1024,
    window=128,
    index_heads=32,
    index_dim=128,
    index_topk=512,
    candidate_block=8,
    candidate_blocks=2048,
    experts=384,
    experts_per_token=6,
    moe_inter=2304,
    vocabulary=129280,
    engram_heads=8,
    engram_dim=256,
)
"""model.md 1.1."""

ODD = OpShapes(
    hidden=96,
    streams=4,
    heads=6,
    head_dim=64,
    rope_dim=16,
    q_lora=160,
    o_groups=2,
    o_lora=32,
    window=11,
    index_heads=3,
    index_dim=32,
    index_topk=7,
    candidate_block=8,
    candidate_blocks=2,
    experts=9,
    experts_per_token=3,
    moe_inter=64,
    vocabulary=131,
    engram_heads=2,
    engram_dim=32,
)
"""Small and off every power of two that quantisation groups allow."""
