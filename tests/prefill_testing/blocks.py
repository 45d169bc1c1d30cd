"""Model specs, layouts, keys and payloads for tests of KV memory and stores. No torch."""

import hashlib
from pathlib import Path

from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import BlockLayout, block_layout
from prefill_plan.model_spec import ModelSpec, load_model_spec

GOLDEN = Path(__file__).parent.parent / "golden"


def tiny_spec() -> ModelSpec:
    """The quantised golden model: 3 KV sources, window 16."""
    return load_model_spec(GOLDEN / "tiny_quant")


def tiny_layout() -> BlockLayout:
    return block_layout(tiny_spec(), RecordFormat.FP4)


def make_key(label: str) -> BlockKey:
    return BlockKey(hashlib.sha256(label.encode()).digest())


def make_payload(layout: BlockLayout, label: str) -> bytes:
    """Bytes that differ from label to label everywhere."""
    return hashlib.shake_128(label.encode()).digest(layout.payload_bytes)
