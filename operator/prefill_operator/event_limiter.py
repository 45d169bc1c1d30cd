"""Kubernetes Events about pools: at most one per minute, reason and pool, so that a storm of failures makes no storm of writes.

Called by apply.py only. Events are for people; one that cannot be written is dropped.
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from prefill_operator.api import Pool
from prefill_operator.model import EmitEvent
from prefill_operator.names import API_VERSION, FIELD_MANAGER
from prefill_operator.resources import EVENTS, Json, PoolKey

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
_MAX_MESSAGE = 1024


@dataclass(slots=True, kw_only=True)
class _Last:
    at: float
    message: str
    num_dropped: int = 0


class EventLimiter:
    """Decides which events are written, and renders them. clock: monotonic seconds.

    on_nodes: events about nodes may be written, too; they lie in the namespace "default".
    """

    def __init__(self, *, identity: str, on_nodes: bool, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._on_nodes = on_nodes
        self._clock = clock
        self._last: dict[tuple[PoolKey, str], _Last] = {}

    def admit(self, key: PoolKey, pool: Pool, event: EmitEvent, *, now: float) -> list[Json]:
        """The Events to POST: none if one of this reason was written less than a minute ago. now: seconds since the epoch."""
        last = self._last.get((key, event.reason))
        if last is not None and self._clock() - last.at < QUIET_SECONDS:
            # A pass that follows at once says the same again: that is no second event.
            last.num_dropped += event.message != last.message
            return []
        more = f" (and {last.num_dropped} more like it)" if last is not None and last.num_dropped else ""
        self._last[key, event.reason] = _Last(at=self._clock(), message=event.message)
        message = event.message[: _MAX_MESSAGE - len(more)] + more
        about = {"apiVersion": API_VERSION, "kind": str(pool.kind), "namespace": pool.namespace, "uid": pool.uid}
        events = [self._render({**about, "name": pool.name}, event, message=message, now=now)]
        if event.node and self._on_nodes:
            node = {"apiVersion": "v1", "kind": "Node", "name": event.node, "uid": event.node}
            events.append(self._render(node, event, message=f"{key}: {message}"[:_MAX_MESSAGE], now=now))
        return events

    def forget(self, key: PoolKey) -> None:
        """The pool is gone."""
        for entry in [entry for entry in self._last if entry[0] == key]:
            del self._last[entry]

    def _render(self, about: Json, event: EmitEvent, *, message: str, now: float) -> Json:
        at = datetime.fromtimestamp(now, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        namespace = about.get("namespace", "default")
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{about['name']}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "involvedObject": about,
            "type": str(event.type),
            "reason": str(event.reason),
            "message": message,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._identity,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
