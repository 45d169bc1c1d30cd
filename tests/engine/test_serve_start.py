"""What `serve` refuses before it starts a process: exit 10 for configuration, 11 for the model's files, one clear line each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from prefill_engine.serve import ServeOptions, check_start, run_serve
from prefill_plan.config import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ReplayConfig,
    StoreConfig,
    StoreKind,
    VisionConfig,
    VisionMode,
)
from prefill_plan.errors import ExitCode
from prefill_testing.engine_rig import IDENTITY, tiny_config


def serve(config: EngineConfig, folder: Path) -> tuple[ExitCode, str]:
    """Exit code and detail; the rank entry does not exist, so nothing may come so far."""
    (folder / "termination").touch()
    options = ServeOptions(
        termination_log=folder / "termination",
        ready_file=None,
        rank_entry="no.such.module:main",
        fault="",
        announce=lambda _line: None,
    )
    ending = run_serve(config, IDENTITY, options)
    assert json.loads((folder / "termination").read_bytes())["exit"] == ending.exit_code
    return ending.exit_code, ending.detail


def test_keep_below_window_and_rollback_is_refused(tmp_path: Path):
    code, detail = serve(tiny_config(replay=ReplayConfig(keep_tokens=20)), tmp_path)
    assert code == ExitCode.CONFIG
    assert "20" in detail
    assert "22" in detail  # window 16 + rollback 6


def test_store_path_that_is_a_file_is_refused(tmp_path: Path):
    path = tmp_path / "kv"
    path.touch()
    code, detail = serve(tiny_config(store=StoreConfig(kind=StoreKind.FILE, path=str(path))), tmp_path)
    assert code == ExitCode.CONFIG
    assert f"store.path {path}" in detail


def test_store_directory_that_cannot_be_used_is_refused(tmp_path: Path):
    # /proc takes no files even from root, unlike a directory without permission bits.
    code, detail = serve(tiny_config(store=StoreConfig(kind=StoreKind.FILE, path="/proc/kv")), tmp_path)
    assert code == ExitCode.CONFIG
    assert "store.path /proc/kv: not a readable and writable directory" in detail


def test_empty_store_path_is_refused(tmp_path: Path):
    assert serve(tiny_config(store=StoreConfig(kind=StoreKind.FILE)), tmp_path)[0] == ExitCode.CONFIG


def test_zero_ranks_are_refused(tmp_path: Path):
    assert serve(tiny_config(parallel=ParallelConfig(dp_size=0)), tmp_path)[0] == ExitCode.CONFIG


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        (VisionConfig(mode=VisionMode.REMOTE), "expected at least one host:port"),
        (VisionConfig(mode=VisionMode.IN_ENGINE, endpoints=("ve:1",)), "expected none, the engine runs its own"),
        (VisionConfig(mode=VisionMode.REMOTE, endpoints=("ve",)), "'ve', expected host:port"),
        (VisionConfig(mode=VisionMode.REMOTE, endpoints=("ve:1",), rows_bytes=4096), "at least one image of 12288"),
        (VisionConfig(mode=VisionMode.IN_ENGINE, numerics_class="x"), "numerics_class = 'x', expected none"),
        (VisionConfig(mode=VisionMode.IN_ENGINE, image_seconds=0), "image_seconds = 0, expected 0.001 to"),
    ],
    ids=["no-endpoints", "endpoints-in-engine", "no-port", "slab-too-small", "numerics-in-engine", "no-time"],
)
def test_vision_that_makes_no_sense_is_refused(tmp_path: Path, vision: VisionConfig, words: str):
    code, detail = serve(tiny_config(vision=vision), tmp_path)
    assert code == ExitCode.CONFIG
    assert words in detail


def test_shared_memory_that_is_not_there_is_refused(tmp_path: Path):
    vision = VisionConfig(mode=VisionMode.REMOTE, endpoints=("ve:1",), rows_bytes=1 << 50)
    code, detail = serve(tiny_config(vision=vision), tmp_path)
    assert code == ExitCode.CONFIG
    assert "vision.rows_bytes = 1125899906842624: /dev/shm has" in detail


def test_missing_model_is_a_checkpoint_error(tmp_path: Path):
    code, detail = serve(tiny_config(model=ModelConfig(path=str(tmp_path / "none"))), tmp_path)
    assert code == ExitCode.CHECKPOINT
    assert "none" in detail


def test_damaged_model_config_is_a_checkpoint_error(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    code, _ = serve(tiny_config(model=ModelConfig(path=str(tmp_path))), tmp_path)
    assert code == ExitCode.CHECKPOINT


def test_usable_store_directory_is_created_and_left_empty(tmp_path: Path):
    path = tmp_path / "a" / "b"
    config = tiny_config(store=StoreConfig(kind=StoreKind.FILE, path=str(path)))
    assert check_start(config).window_tokens == 16
    assert os.listdir(path) == []
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_front_loads_no_torch():
    code = "import sys, prefill_engine.cli.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
