"""What users may not write into engine.args and encoder.args: the operator's arguments, and settings that pods, probes and the
memory plan were made with.

Pure; called when a pod is rendered. The trap: an engine takes the last `--set` of a setting, a whole part at once
(`--set kv={...}`), and engines of old also short forms of options (`--conf`), so all of these are refused here.
"""

from collections.abc import Mapping
from types import MappingProxyType

from prefill_operator.errors import PoolInvalid

_SET = "--set"
_RESERVED_OPTIONS: Mapping[str, str] = MappingProxyType(
    {"--config": "", "--model": "spec.model.source", "--ready-file": "", "--termination-log": ""}
)

_SERVER_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "server.drain_seconds": "spec.lifecycle.drainTimeoutSeconds",
        "server.host": "",
        "server.load_timeout_seconds": "spec.lifecycle.loadTimeoutSeconds",
        "server.metrics_port": "",
        "server.port": "",
        "server.probe_port": "",
    }
)

ENGINE_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "device": "spec.engine.device",
        "handoff.data_port": "",
        "kv.pool_tokens": "spec.kvCache.tokensPerGPU",
        "kv.record_format": "",
        "kv.snapshot_bytes": "spec.kvCache.swaPool",
        "kv.state_slots": "spec.kvCache.sequencesPerGPU",
        "kvd.socket": "",
        "max_context_tokens": "spec.context.maxTokens",
        "model.path": "spec.model.source",
        "parallel": "spec.expertParallel",
        "replay.keep_tokens": "spec.context.keepTokens",
        "replay.max_rollback_tokens": "spec.context.maxRollbackTokens",
        "scheduler.chunk_cap_tokens": "spec.context.chunkTokensPerGPU",
        "store.max_bytes": "spec.kvCache.hostPool",
        "vision": "spec.vision",
        **_SERVER_SETTINGS,
    }
)
"""Setting, or a part with all its settings -> the field of a PrefillPool that it follows from; "" = no field has it."""

ENCODER_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "batching.max_delay_milliseconds": "spec.batching.maxDelayMilliseconds",
        "batching.max_patches_per_batch": "spec.batching.maxPatchesPerBatch",
        "batching.max_patches_per_image": "spec.batching.maxPatchesPerImage",
        "device": "spec.encoder.device",
        "model.path": "spec.model.source",
        "queue.max_patches": "spec.balancing.maxPendingPatchesPerVE",
        **_SERVER_SETTINGS,
    }
)
"""As ENGINE_SETTINGS, of a VEPool."""


def check_arguments(arguments: tuple[str, ...], *, field: str, settings: Mapping[str, str]) -> None:
    """Raises PoolInvalid for an argument that would replace one of the operator's; the message names the field to use."""
    previous = ""
    for index, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        where = f"{field}[{index}]"
        if previous == _SET:
            _check_setting(argument, settings, where=where)
            previous = ""
            continue
        if option == _SET:
            _check_setting(value, settings, where=where)
        else:
            _check_option(argument, option, where=where)
        previous = argument


def _check_option(argument: str, option: str, *, where: str) -> None:
    if option in _RESERVED_OPTIONS:
        raise PoolInvalid(where, value=argument, rule=_rule(_RESERVED_OPTIONS[option]))
    if option.startswith("--") and len(option) > len("--"):
        full = next((known for known in (*_RESERVED_OPTIONS, _SET) if known.startswith(option)), None)
        if full is not None:
            raise PoolInvalid(where, value=argument, rule=f"is short for {full}; write options out")


def _check_setting(setting: str, settings: Mapping[str, str], *, where: str) -> None:
    key = setting.partition("=")[0]
    for path, source in settings.items():
        if f"{key}.".startswith(f"{path}."):
            raise PoolInvalid(where, value=setting, rule=_rule(source))
        if path.startswith(f"{key}."):
            raise PoolInvalid(where, value=setting, rule=f"would replace all of {key}, and {path} {_rule(source)}")


def _rule(source: str) -> str:
    return f"is set by the operator, from {source}" if source else "is set by the operator, and no field changes it"
