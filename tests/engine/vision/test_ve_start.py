"""What `ve serve` refuses before it starts anything, and how it says so."""

import json
from pathlib import Path

import pytest

from prefill_engine.__main__ import main
from prefill_engine.settings import load_encoder_config
from prefill_engine.vision.encoder_process import warmup_batches
from prefill_engine.vision.process import check_ve_start
from prefill_plan.encoder_config import check_encoder_config
from prefill_plan.errors import CheckpointError, ConfigError
from prefill_plan.model_spec import released_model_spec
from prefill_testing.ve_process import TINY_VISION

MODEL = f"model.path={TINY_VISION}"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("batching.max_patches_per_image=0", "batching.max_patches_per_image = 0, expected at least 1"),
        (
            "batching.max_patches_per_batch=100",
            "max_patches_per_batch = 100, expected at least one image of 9216 patches",
        ),
        ("batching.max_images_per_batch=0", "batching.max_images_per_batch = 0, expected at least 1"),
        ("queue.max_patches=9215", "queue.max_patches = 9215, expected at least one image of 9216 patches, or 0"),
        ("rows.cache_bytes=3000000000", "rows.cache_bytes = 3000000000, expected 0 to rows.memory_bytes = 2147483648"),
        (
            "rows.hold_seconds=601",
            "rows.hold_seconds = 601.0, expected more than 0 and at most rows.max_hold_seconds = 600",
        ),
        ("queue.max_calls=0", "queue.max_calls = 0, expected at least 1"),
        ("decode.workers=-1", "decode.workers = -1, expected 0 or more"),
        ("decode.image_cpu_seconds=0", "decode.image_cpu_seconds = 0.0, expected more than 0"),
        ("image_seconds=0", "image_seconds = 0.0, expected more than 0"),
        ("activation=fp8", "activation = fp8, expected bf16 or fp32"),
    ],
)
def test_values_that_make_no_sense_are_named(setting: str, text: str) -> None:
    config = load_encoder_config(None, [MODEL, setting])
    with pytest.raises(ConfigError) as caught:
        check_encoder_config(config)
    assert text in caught.value.message


def test_defaults_are_the_documented_ones() -> None:
    config = load_encoder_config(None, [MODEL])
    check_encoder_config(config)
    assert config.max_queued_patches == 4 * 16_384
    assert (config.batching.max_images_per_batch, config.batching.max_delay_milliseconds) == (8, 2.0)
    assert (config.rows.hold_seconds, config.rows.rejected_seconds, config.image_seconds) == (60.0, 60.0, 10.0)


def test_checkpoint_without_a_tower_is_refused(tmp_path: Path) -> None:
    config = json.loads((TINY_VISION / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for folder, text in (
        (tmp_path, "no vision_config, there is nothing to serve"),
        (tmp_path / "none", "cannot read the model config"),
    ):
        with pytest.raises(CheckpointError, match=text):
            check_ve_start(load_encoder_config(None, [f"model.path={folder}"]))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            ("rows.memory_bytes=12287", "rows.cache_bytes=0"),
            "rows.memory_bytes = 12287, expected at least one image of 12288 bytes",
        ),
        (
            ("rows.memory_bytes=24575", "rows.cache_bytes=0", "activation=fp32"),
            "rows.memory_bytes = 24575, expected at least one image of 24576 bytes",
        ),
        (
            ("queue.max_image_bytes=31999999",),
            "queue.max_image_bytes = 31999999, expected at least one image of 32000000 bytes",
        ),
    ],
    ids=["rows", "rows of fp32", "encoded bytes"],
)
def test_no_room_for_the_largest_image_is_refused(settings: tuple[str, ...], text: str) -> None:
    """It would be told for ever to come again later. 64 tokens of 96 values are the most of this checkpoint."""
    with pytest.raises(ConfigError) as caught:
        check_ve_start(load_encoder_config(None, [MODEL, *settings]))
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), [[1_521], [9_189, 4_784, 1_610]]),
        (("batching.max_patches_per_batch=32768",), [[1_521], [9_189] * 3 + [4_784]]),
        (("batching.max_images_per_batch=1",), [[1_521], [9_189]]),
        (("batching.max_patches_per_image=5000",), [[1_521], [4_784] * 3 + [1_610]]),
        (("batching.max_patches_per_image=1000",), [[1_521]]),
        (("device=cpu",), [[1_521]]),
    ],
    ids=["default", "large batches", "one image", "small images", "none", "cpu"],
)
def test_warm_up_fills_a_batch_so_that_memory_fails_at_start(
    settings: tuple[str, ...], expected: list[list[int]]
) -> None:
    spec = released_model_spec().vision
    assert spec is not None
    batches = warmup_batches(load_encoder_config(None, [MODEL, *settings]), spec)
    assert [[plan.num_patches for plan in batch] for batch in batches] == expected


@pytest.mark.parametrize(
    ("setting", "code", "text"),
    [
        ("rows.hold=5", 10, "rows: Object contains unknown field hold"),
        ("rows.memory_bytes=1000000000000000", 10, "/dev/shm has"),
        ("model.path=/nowhere", 11, "model.path /nowhere"),
    ],
)
def test_refusal_is_one_line_an_exit_code_and_a_termination_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, code: int, text: str
) -> None:
    log = tmp_path / "termination"
    log.touch()
    assert main(["ve", "serve", "--set", MODEL, "--set", setting, "--termination-log", str(log)]) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert line.startswith("prefill-engine ve serve: ")
    assert text in line
    message = json.loads(log.read_bytes())
    assert (message["exit"], message["phase"], text in message["detail"]) == (code, "start", True)


def test_tools_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ve", "encode", str(tmp_path / "none.png")]) == 2
    assert "none.png: cannot be read: No such file or directory; nothing was sent" in capsys.readouterr().err
    assert main(["ve", "info", "--endpoint", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1: UNAVAILABLE" in capsys.readouterr().err
