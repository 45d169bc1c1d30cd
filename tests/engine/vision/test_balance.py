"""Images over simulated encoders: traces small enough to check by hand, the order of the policies, and the command."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from prefill_engine.__main__ import main
from prefill_engine.vision.balance import (
    Fleet,
    Policy,
    by_images,
    by_patches,
    by_round_robin,
    compare_policies,
    percentile,
    replay,
)
from prefill_engine.vision.balance_trace import Arrival, Traffic, make_trace, read_trace
from prefill_engine.vision.batch_plan import BatchLimits
from prefill_plan.errors import ConfigError


def fleet(*ms_per_patch: float, batch_ms: float = 0.0, patches: int = 16, images: int = 8) -> Fleet:
    limits = BatchLimits(max_patches=patches, max_images=images, max_delay=0.0)
    return Fleet(ms_per_patch=ms_per_patch, batch_ms=batch_ms, limits=limits)


def trace(*images: tuple[float, int]) -> tuple[Arrival, ...]:
    """Of (milliseconds, patches)."""
    return tuple(Arrival(time=ms / 1e3, patches=patches) for ms, patches in images)


# The third image comes when one encoder has 10 patches and the other 2.
_UNEVEN = trace((0, 10), (1, 2), (2, 4))


@pytest.mark.parametrize(
    ("policy", "images", "encoders", "latencies"),
    [
        pytest.param(by_round_robin, _UNEVEN, fleet(1, 1), (10, 2, 12), id="round robin is blind"),
        pytest.param(by_images, _UNEVEN, fleet(1, 1), (10, 2, 12), id="one image each is a tie"),
        pytest.param(by_patches, _UNEVEN, fleet(1, 1), (10, 2, 5), id="patches see the large one"),
        pytest.param(
            by_images, trace((0, 4), (0, 4), (0, 4)), fleet(1, images=2), (8, 8, 12), id="batch full of images"
        ),
        pytest.param(by_images, trace((0, 10), (0, 10)), fleet(1), (10, 20), id="batch full of patches"),
        pytest.param(by_images, trace((0, 4), (1, 4)), fleet(1, batch_ms=3), (7, 13), id="each batch has its own cost"),
        pytest.param(by_images, trace((0, 4), (4, 4)), fleet(1), (4, 4), id="an end and an arrival at one time"),
        # The large one came first, but lets as many patches pass as it has itself (batch_plan).
        pytest.param(by_images, trace((0, 1), (0.5, 15), (0.5, 2)), fleet(1), (1, 17.5, 2.5), id="small before large"),
        # A card that takes three times as long gets nothing until the fast one is three images behind.
        pytest.param(by_patches, trace((0, 4), (0, 4), (0, 4)), fleet(1, 3), (12, 12, 12), id="slow card left alone"),
        pytest.param(by_images, trace((0, 4), (0, 4), (0, 4)), fleet(1, 3), (8, 12, 8), id="slow card by images"),
    ],
)
def test_replay_gives_the_latencies_of_a_hand_checked_trace(
    policy: Policy, images: tuple[Arrival, ...], encoders: Fleet, latencies: tuple[float, ...]
) -> None:
    assert replay(images, encoders, policy) == pytest.approx(latencies)


@pytest.mark.parametrize("burst", [1, 6])
def test_patches_are_no_worse_than_images_and_those_no_worse_than_round_robin(burst: int) -> None:
    encoders = fleet(*[0.005] * 8, patches=16_384)
    traffic = Traffic(images=1500, burst=burst, patches_per_second=0.9 * encoders.patches_per_second)
    results = compare_policies([make_trace(traffic, seed=seed) for seed in range(4)], encoders)
    p99 = {result.policy: fmean(result.p99) for result in results}
    assert p99["patches"] <= p99["images"] <= p99["round robin"]


def test_no_image_is_faster_than_alone_and_none_is_lost() -> None:
    encoders = fleet(0.005, 0.02, batch_ms=1.5, patches=16_384)
    images = make_trace(Traffic(images=500, burst=3, patches_per_second=encoders.patches_per_second), seed=3)
    latencies = replay(images, encoders, by_patches)
    too_fast = [
        (image, ms) for image, ms in zip(images, latencies, strict=True) if ms < 1.5 + 0.005 * image.patches - 1e-6
    ]
    assert too_fast == []


def test_made_trace_has_its_bursts_its_load_and_depends_on_the_seed_only() -> None:
    encoders = fleet(*[0.005] * 8, patches=16_384)
    traffic = Traffic(images=6000, burst=6, patches_per_second=0.5 * encoders.patches_per_second)
    images = make_trace(traffic, seed=7)
    assert images == make_trace(traffic, seed=7)
    assert images != make_trace(traffic, seed=8)
    assert len({image.time for image in images}) == 1000
    assert encoders.load_of(images) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value


def test_recorded_trace_may_be_log_lines_out_of_order() -> None:
    lines = ['{"time": 2, "patches": 9, "level": "info"}', "", '{"time": 1.5, "patches": 1}']
    assert read_trace(lines, name="x", max_patches=9) == trace((1500, 1), (2000, 9))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"time": 1}', "line 2"),
        ("{", "line 2"),
        ('{"time": 1, "patches": 0}', "0 patches"),
        ('{"time": 1, "patches": 17}', "expected 1 to 16"),
        ('{"time": "noon", "patches": 1}', "line 2"),
    ],
)
def test_a_line_that_is_no_image_is_named(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(['{"time": 0, "patches": 1}', line], name="x", max_patches=16)


def test_command_prints_the_same_figures_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["ve-balance", "--encoders", "3", "--images", "200", "--runs", "2", "--json"]
    assert main(options) == 0
    first = capsys.readouterr().out
    assert main(options) == 0
    assert capsys.readouterr().out == first
    report = json.loads(first)
    assert [each["policy"] for each in report["policies"]] == ["round robin", "images", "patches"]
    assert [len(each["p99"]) for each in report["policies"]] == [2, 2, 2]


def test_command_replays_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"time": 0, "patches": 1000}\n{"time": 1, "patches": 2000}\n')
    assert main(["ve-balance", "--trace", str(file), "--encoders", "1", "--ms-per-patch", "0.01"]) == 0
    table = capsys.readouterr().out
    assert "1 encoders, 0.01 ms per patch" in table
    assert [line.split()[-4:] for line in table.splitlines()[-3:]] == [["10.0", "20.0", "15.0", "1.00"]] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--encoders", "0"], "--encoders 0"),
        (["--ms-per-patch", "0.005", "0.01"], "2 values for 8 encoders"),
        (["--load", "0"], "--load 0"),
        (["--batch-patches", "8000"], "never split"),
        (["--trace", "/nowhere/x"], "cannot be read"),
    ],
)
def test_command_refuses_what_makes_no_sense(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ve-balance", *options]) == 2
    assert words in capsys.readouterr().err
