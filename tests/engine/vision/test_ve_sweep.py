"""The sweep of a vision encoder: its cases, its fit, its table and picture, in process and through a running encoder."""

import json
import socket
from pathlib import Path

import pytest
from PIL import Image

from prefill_engine.__main__ import main
from prefill_engine.vision import sweep_plot
from prefill_engine.vision.sweep import SweepLimits, plan_cases
from prefill_engine.vision.sweep_points import TOWER, SweepCase, SweepPoint, fit_points
from prefill_plan.errors import ImageRejected
from prefill_testing.encoded_images import RELEASE_SPEC
from prefill_testing.ve_process import TINY_VISION, start_ve

LIMITS = SweepLimits(max_patches=16_384, max_images=8)


def point(patches: int, *ms: float, images: int = 1) -> SweepPoint:
    case = SweepCase(width=14, height=14 * patches, patches=patches, tokens=patches, images=images)
    return SweepPoint(case=case, way=TOWER, ms=ms)


def test_cases_are_the_batches_that_an_encoder_forms() -> None:
    cases = plan_cases([(1, 1), (544, 544), (1920, 1080)], [1, 2, 8, 16], spec=RELEASE_SPEC, limits=LIMITS)
    # 1x1 and 544x544 become one size; two screenshots of 8,418 patches are more than a batch.
    assert [(case.width, case.height, case.patches, case.tokens, case.images) for case in cases] == [
        (546, 546, 1521, 184, 1),
        (546, 546, 1521, 184, 2),
        (546, 546, 1521, 184, 8),
        (1708, 966, 8418, 968, 1),
    ]


def test_a_size_that_no_image_can_have_is_refused() -> None:
    with pytest.raises(ImageRejected):
        plan_cases([(0, 5)], [1], spec=RELEASE_SPEC, limits=LIMITS)


def test_fit_finds_the_line_and_its_spread_over_rounds() -> None:
    # Rounds: 2 + 0.01 p, then 3 + 0.02 p, then 4 + 0.03 p.
    points = [point(100, 3, 5, 7), point(1000, 12, 23, 34), point(500, 12, 23, 34, images=2)]
    fit = fit_points(points)
    assert (fit.a_ms, fit.b_ms) == pytest.approx((3, 0.02))
    assert fit.a_range == pytest.approx((2, 4))
    assert fit.b_range == pytest.approx((0.01, 0.03))
    assert fit.worst_share == pytest.approx(0)


def test_fit_says_how_far_a_point_is_off() -> None:
    fit = fit_points([point(100, 10.0), point(200, 20.0), point(300, 60.0)])
    misses = [abs(fit.a_ms + fit.b_ms * patches - ms) / ms for patches, ms in ((100, 10.0), (200, 20.0), (300, 60.0))]
    assert fit.worst_share == pytest.approx(max(misses))
    assert fit.worst_share > 0.1


def test_rates_follow_from_the_median() -> None:
    measured = point(100, 50.0, 10.0, 20.0, images=4)
    assert (measured.patches_per_second, measured.images_per_second) == pytest.approx((20_000, 200))


def test_command_measures_the_tower_in_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "sweep.png"
    options = ["--device", "cpu", "--sizes", "100x100,300x200", "--batches", "1,2", "--rounds", "2"]
    assert main(["ve-sweep", "--model", str(TINY_VISION), *options, "--json", "--plot", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(each["way"], each["images"], len(each["ms"])) for each in report["points"]] == [
        ("tower", 1, 2),
        ("tower", 2, 2),
    ] * 2
    assert [fit["way"] for fit in report["fits"]] == ["tower"]
    assert report["fits"][0]["b_ms"] > 0
    with Image.open(picture) as image:
        # Not an empty sheet: the points and lines have colours.
        assert image.size > (800, 300)
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10


def test_command_measures_a_running_encoder_cache_off_and_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sizes", "100x100,300x200", "--batches", "1,3", "--rounds", "2"]
    with start_ve(tmp_path) as ve:
        assert main(["ve-sweep", "--endpoint", ve.endpoint, *options, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert main(["ve-sweep", "--endpoint", ve.endpoint, "--sizes", "100x100", "--batches", "1"]) == 0
    found = [(each["way"], each["images"], each["hits"]) for each in report["points"]]
    unseen, cached = [("unseen", 1, 0), ("unseen", 3, 0)], [("cached", 1, 2), ("cached", 3, 6)]
    assert found == [*unseen, *unseen, *cached, *cached]
    # A second sweep's images are new to the encoder, too.
    table = capsys.readouterr().out
    assert "cached: the same images again, 5 of 5 from the encoder's cache" in table
    assert "unseen:" in table


def test_an_encoder_that_is_not_there_is_a_failure_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert main(["ve-sweep", "--endpoint", f"127.0.0.1:{held.getsockname()[1]}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cpu", "--sizes", "640"], "expected such as"),
        (["--device", "cpu", "--batches", "0"], "expected such as"),
        (["--device", "cpu", "--rounds", "0"], "--rounds 0"),
        (["--device", "cpu", "--batches", "9"], "0 cases"),
        (["--device", "cpu", "--plot", "x.svg"], "ends in .png"),
        (["--device", "cpu", "--plot", "/nowhere/x.png"], "no directory /nowhere"),
        (["--device", "cpu", "--activation", "fp32", "--ops", "triton"], "--ops"),
    ],
)
def test_command_refuses_what_makes_no_sense(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ve-sweep", "--model", str(TINY_VISION), *options]) == 2
    assert words in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_plot.importlib.util, "find_spec", lambda _name: None)
    assert main(["ve-sweep", "--model", str(TINY_VISION), "--device", "cpu", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'prefill[plots]'" in capsys.readouterr().err
