"""The two lines that say what a decode probe found."""

import msgspec
import pytest

from prefill_engine.probe_report import ProbeReport, describe_probe

RIGHT = ProbeReport(
    prompt_tokens=300,
    first_token=7,
    next_token=9,
    num_bytes=1000,
    max_abs_diff=0.0,
    differing_blocks=0,
    num_blocks=2,
    windows_equal=True,
    is_replayed=False,
    cold_max_abs_diff=0.0,
    cold_kl=0.0,
    cold_same_token=True,
    problems=(),
)


@pytest.mark.parametrize(
    ("changes", "verdict", "distance"),
    [
        ({}, "equal a one-shot prefill bit for bit", "0 away from a cold run: nothing was replayed"),
        ({"max_abs_diff": 3e-6}, "equal a one-shot prefill to 3e-06", "0 away from a cold run"),
        (
            {"is_replayed": True, "cold_max_abs_diff": 0.25, "cold_kl": 0.012, "cold_same_token": False},
            "equal a run that replays at the same place bit for bit",
            "0.25 away from a cold run at most (KL 0.012 nats, another next token): replay is an approximation",
        ),
        ({"problems": ("a", "b")}, "WRONG: a; b", "0 away from a cold run"),
    ],
    ids=["exact", "close", "replayed", "wrong"],
)
def test_description(changes: dict[str, object], verdict: str, distance: str) -> None:
    lines = describe_probe(msgspec.convert(msgspec.to_builtins(RIGHT) | changes, ProbeReport))
    assert verdict in lines[0]
    assert distance in lines[1]
