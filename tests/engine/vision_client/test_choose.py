"""Which encoder gets an image: by time, not by count."""

import pytest

from prefill_engine.vision_client.choose import EncoderLoad, choose_encoder


def load(address: str, patches: int, *, a_ms: float = 5.0, b_ms: float = 0.01) -> EncoderLoad:
    return EncoderLoad(address=address, patches=patches, a_ms=a_ms, b_ms=b_ms)


@pytest.mark.parametrize(
    ("loads", "patches", "avoid", "chosen"),
    [
        pytest.param([], 100, (), None, id="none"),
        pytest.param([load("a", 900), load("b", 800)], 100, (), "b", id="fewer-patches"),
        pytest.param([load("a", 100), load("b", 100)], 100, (), "a", id="tie-by-address"),
        # 1,000 patches on a card twice as fast are done before 600 on the slow one.
        pytest.param(
            [load("fast", 1000, b_ms=0.01), load("slow", 600, b_ms=0.02)], 500, (), "fast", id="ms-not-patches"
        ),
        # A small queue in front of a slow start loses for a small image only.
        pytest.param([load("a", 0, a_ms=50.0), load("b", 3000)], 100, (), "b", id="fixed-part-counts"),
        pytest.param([load("a", 0), load("b", 9000)], 100, ("a",), "b", id="avoided"),
        pytest.param([load("a", 0)], 100, ("a",), "a", id="avoided-but-alone"),
        pytest.param([load("a", 900, b_ms=0), load("b", 800, b_ms=0)], 100, (), "b", id="nothing-measured"),
        pytest.param([load("new", 900, b_ms=0), load("old", 800)], 100, (), "old", id="new-one-draws-not-all"),
        pytest.param([load("a", 9000), load("b", 0)], 100, ("a", "b"), "b", id="all-avoided"),
    ],
)
def test_encoder_that_is_done_first_is_chosen(
    loads: list[EncoderLoad], patches: int, avoid: tuple[str, ...], chosen: str | None
) -> None:
    assert choose_encoder(loads, patches=patches, avoid=avoid) == chosen
