"""Is the engine well? Pure judgement of its state and of the two health services (C44; serving.md fact 9: tied to progress)."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_MIN_SILENCE_SECONDS = 5.0
_SILENCE_LAYERS = 10


class EngineState(StrEnum):
    """Names of pe.v1.LoadReport.State."""

    STARTING = "STARTING"
    READY = "READY"
    DEGRADED = "DEGRADED"
    DRAINING = "DRAINING"
    WEDGED = "WEDGED"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPulse:
    """Of a rank that has rows in steps. last_sign: its last beat, or when the work began if that is later."""

    last_sign: float
    predicted_layer_ms: float


def is_wedged(pulse: RankPulse, *, now: float) -> bool:
    """No beat for max(5 s, 10 x the predicted time of a layer)."""
    return now - pulse.last_sign > max(_MIN_SILENCE_SECONDS, _SILENCE_LAYERS * pulse.predicted_layer_ms / 1e3)


def judge_state(*, ready: bool, draining: bool, degraded: bool, pulses: Iterable[RankPulse], now: float) -> EngineState:
    """WEDGED beats DRAINING beats STARTING beats DEGRADED."""
    if any(is_wedged(pulse, now=now) for pulse in pulses):
        return EngineState.WEDGED
    if draining:
        return EngineState.DRAINING
    if not ready:
        return EngineState.STARTING
    return EngineState.DEGRADED if degraded else EngineState.READY


def is_live(state: EngineState) -> bool:
    """Health service "": also while starting or draining."""
    return state is not EngineState.WEDGED


def is_serving(state: EngineState) -> bool:
    """Health service pe.v1.PrefillEngine: startup and readiness."""
    return state in (EngineState.READY, EngineState.DEGRADED)
