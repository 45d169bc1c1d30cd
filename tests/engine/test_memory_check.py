"""The memory plan as a rank makes it at start, from its own configuration (k8s.md 4.3)."""

import logging
from unittest.mock import Mock

import msgspec
import pytest
import torch

from prefill_engine.memory_check import check_memory
from prefill_engine.rank import build
from prefill_engine.rank.errors_at_exit import describe_failure
from prefill_plan.config import Device, EngineConfig, KvConfig, ModelConfig, SchedulerConfig
from prefill_plan.errors import ConfigError, ExitCode
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_plan.memory import GPU_BYTES
from prefill_plan.model_spec import load_model_spec, released_model_spec
from prefill_testing.rank_harness import tiny_engine_config

RELEASE = EngineConfig(model=ModelConfig(path="/models/v41"))
HUGE = 1_000_000_000_000


def test_sum_is_of_what_the_configuration_says() -> None:
    spec = released_model_spec()
    config = msgspec.structs.replace(RELEASE, kv=KvConfig(pool_tokens=2_097_152, state_slots=154))
    plan = check_memory(config, spec, usable_bytes=HUGE)
    state = state_layout(spec, keep_tokens=140, rollback_tokens=6)

    assert plan.kv_bytes == 2_097_152 // 128 * block_layout(spec, config.kv.record_format).stride_bytes
    # What the operator renders for 64 sequences.
    assert plan.state_bytes == 154 * state.gpu_slot_bytes
    assert (plan.settings.max_sequences, plan.ep_size, plan.settings.chunk_tokens) == (64, 1, 32_768)
    assert plan.weights.engram > 0


@pytest.mark.parametrize("slots", [1, 2, 3, 64, 65, 153, 154, 155, 1000])
def test_no_slot_is_left_out(slots: int) -> None:
    spec = released_model_spec()
    plan = check_memory(msgspec.structs.replace(RELEASE, kv=KvConfig(state_slots=slots)), spec, usable_bytes=HUGE)
    slot = state_layout(spec, keep_tokens=140, rollback_tokens=6).gpu_slot_bytes

    assert slots * slot <= plan.state_bytes <= (slots + 4) * slot


def test_a_gpu_that_is_too_small_is_a_configuration_error_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"GB per GPU, limit 145\.60 GB .* GB short; nothing was loaded") as refusal:
        check_memory(RELEASE, released_model_spec(), usable_bytes=GPU_BYTES["H200-141"])
    failure = describe_failure(refusal.value, rank=0, phase="start")
    assert failure.exit_code == ExitCode.CONFIG
    assert "experts" in failure.detail


def test_totals_that_differ_a_little_refuse_nobody() -> None:
    """A pool that fills its plan to the last byte, on a GPU of which CUDA tells a little less than the operator's table."""
    need = check_memory(RELEASE, released_model_spec(), usable_bytes=HUGE).need_bytes
    plan = check_memory(RELEASE, released_model_spec(), usable_bytes=need)
    assert not plan.fits
    with pytest.raises(ConfigError, match="too small"):
        check_memory(RELEASE, released_model_spec(), usable_bytes=need - 1)


@pytest.mark.parametrize(("pool_tokens", "chunk"), [(256, 32_768), (1 << 30, 32_768), (4096, 1 << 24)])
def test_small_pools_are_no_error_and_large_settings_count(pool_tokens: int, chunk: int) -> None:
    config = tiny_engine_config()
    config = msgspec.structs.replace(
        config,
        kv=msgspec.structs.replace(config.kv, pool_tokens=pool_tokens),
        scheduler=SchedulerConfig(chunk_cap_tokens=chunk),
    )
    spec = load_model_spec(build.Path(config.model.path))
    if pool_tokens == 256:
        assert check_memory(config, spec, usable_bytes=GPU_BYTES["H200-141"]).fits
    else:
        with pytest.raises(ConfigError, match="GB short"):
            check_memory(config, spec, usable_bytes=20_000_000_000)


def test_a_rank_checks_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = Mock(return_value=Mock(total_memory=1_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    config = msgspec.structs.replace(tiny_engine_config(), device=Device.GPU)

    with pytest.raises(ConfigError, match=r"limit 0\.97 GB"):
        build._read_design(config)
    properties.assert_called_once_with(torch.device("cuda", 0))


def test_the_cpu_profile_says_that_nothing_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build._read_design(tiny_engine_config())
    assert "memory plan not checked" in caplog.text
