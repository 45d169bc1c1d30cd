"""The header of a frame: it comes back as it was, and any bytes are a frame or a FrameError."""

from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.kv.transport.frame import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    Op,
    Refusal,
    decode,
    encode,
)

FRAMES = st.builds(
    Frame,
    op=st.sampled_from(Op),
    exchange=st.integers(0, 2**32 - 1),
    key=st.binary(min_size=32, max_size=40),
    length=st.integers(0, MAX_PAYLOAD_BYTES),
    status=st.sampled_from(Refusal),
    patience_ms=st.integers(0, 2**32 - 1),
)


@given(FRAMES)
def test_a_header_comes_back_as_it_was(frame: Frame) -> None:
    header = encode(frame)
    assert len(header) == HEADER_BYTES
    assert decode(header) == frame


@given(FRAMES, st.integers(0, HEADER_BYTES - 1), st.binary(min_size=1, max_size=8))
def test_any_bytes_are_a_frame_or_a_frame_error(frame: Frame, at: int, noise: bytes) -> None:
    header = (encode(frame)[:at] + noise + encode(frame)[at:])[:HEADER_BYTES]
    try:
        found = decode(header)
    except FrameError:
        return
    assert found.length <= MAX_PAYLOAD_BYTES
    assert 32 <= len(found.key) <= 40
