"""Where events of the watches end: the cache, and the queue of pools to look at. Called by handlers.py."""

import logging
import time
from collections.abc import Callable

from prefill_operator.cache import Cache, object_id
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.resources import Json, PoolKey, Resource

logger = logging.getLogger(__name__)

# The first LIST of a resource comes page by page; a page after a longer pause belongs to another LIST.
_LIST_PAUSE_SECONDS = 15.0


class EventSink:
    """clock: monotonic seconds."""

    def __init__(
        self,
        cache: Cache,
        add: Callable[[PoolKey], None],
        *,
        metrics: OperatorMetrics,
        on_relist: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._add = add
        self._metrics = metrics
        self._on_relist = on_relist
        self._clock = clock
        self._listed_at: dict[Resource, float] = {}

    def take(self, resource: Resource, kind: str | None, body: Json) -> None:
        """One event of a watch. kind: ADDED, MODIFIED, DELETED, or None for an object of a LIST."""
        if kind is None:
            self._note_list(resource)
        if kind == "DELETED":
            uid = body["metadata"].get("uid", "")
            affected = self._cache.remove(resource, object_id(body), uid=uid)
        else:
            affected = self._cache.put(resource, body)
        for key in affected:
            self._add(key)

    def _note_list(self, resource: Resource) -> None:
        """A LIST after the first one means that the watch had been lost, and objects may have gone unnoticed."""
        now, last = self._clock(), self._listed_at.get(resource)
        self._listed_at[resource] = now
        if last is not None and now - last > _LIST_PAUSE_SECONDS:
            self._metrics.count_relist(resource.plural)
            logger.warning("watch began again", extra={"resource": resource.plural})
            self._on_relist()
