"""Which of several operators may write: a Lease of coordination.k8s.io, renewed in the background.

Expiry of somebody else's hold is judged on our own clock since the record last changed, never by comparing clocks. The trap:
a process that was stopped and continued still believes to lead; so every write asks `check` first, and the hold is over for
us `renew_deadline` after the last renewal began, before others may take it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from prefill_operator.cluster import Cluster
from prefill_operator.errors import ClusterError, LeaseLost
from prefill_operator.names import LEASE_NAME
from prefill_operator.resources import LEASES, Json
from prefill_operator.settings import LeaseTimes

logger = logging.getLogger(__name__)


def boot_seconds() -> float:
    """Monotonic seconds that also count while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderLease:
    """One candidate's view of the Lease. `identity` must be unique among the candidates."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        identity: str,
        times: LeaseTimes,
        clock: Callable[[], float] = boot_seconds,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._identity = identity
        self._times = times
        self._clock = clock
        self._sleep = sleep
        self._renewed_at: float | None = None
        """When the last successful renewal began; None = not held."""
        self._record: tuple[str, str] | None = None
        self._record_seen_at = 0.0
        self.last_contact = clock()
        """When the API server last answered us about the Lease; standbys are healthy by this."""

    def valid(self) -> bool:
        """Whether this process may write now."""
        return self._renewed_at is not None and self._clock() - self._renewed_at < self._times.renew_deadline_seconds

    def check(self) -> None:
        """Raises LeaseLost unless this process may write now."""
        if not self.valid():
            raise LeaseLost(
                f"Lease {self._namespace}/{LEASE_NAME} is not held by {self._identity}; nothing was written"
            )

    async def acquire(self) -> None:
        """Returns once this process leads."""
        while not await self.try_hold():
            await self._sleep(self._times.retry_seconds)
        logger.info("leading", extra={"lease": f"{self._namespace}/{LEASE_NAME}", "identity": self._identity})

    async def keep(self) -> None:
        """Renews for as long as possible. Raises LeaseLost when that failed for renew_deadline_seconds."""
        while True:
            await self._sleep(self._times.retry_seconds)
            await self.try_hold()
            self.check()

    async def release(self) -> None:
        """Lets others take over at once. Does nothing if the Lease is not ours."""
        if not self.valid():
            return
        self._renewed_at = None
        with suppress(ClusterError):
            lease = await self._cluster.find(LEASES, namespace=self._namespace, name=LEASE_NAME)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"].update(holderIdentity="", leaseDurationSeconds=1, renewTime=_now())
                await self._cluster.replace(LEASES, lease)
        logger.info("released the lease", extra={"identity": self._identity})

    async def try_hold(self) -> bool:
        """One attempt to take or renew; failures are logged, since the next attempt comes soon."""
        began = self._clock()
        try:
            async with asyncio.timeout(self._times.renew_deadline_seconds):
                held = await self._write_hold()
        except (ClusterError, TimeoutError) as error:
            logger.warning("lease not renewed", extra={"error": str(error), "identity": self._identity})
            return False
        self._renewed_at = began if held else None
        return held

    async def _write_hold(self) -> bool:
        """Writes our name into the Lease if it is free. Returns whether it was."""
        lease = await self._cluster.find(LEASES, namespace=self._namespace, name=LEASE_NAME)
        self.last_contact = self._clock()
        if lease is None:
            await self._cluster.create(LEASES, self._first_lease())
            return True
        if not self._is_free(lease):
            return False
        await self._cluster.replace(LEASES, self._taken(lease))
        return True

    def _is_free(self, lease: Json) -> bool:
        """Ours, nobody's, or not renewed for its duration since we first saw this record."""
        spec = lease["spec"]
        record = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if record != self._record:
            self._record, self._record_seen_at = record, self._clock()
        duration = spec.get("leaseDurationSeconds") or self._times.duration_seconds
        return record[0] in ("", self._identity) or self._clock() - self._record_seen_at >= duration

    def _taken(self, lease: Json) -> Json:
        spec = lease["spec"]
        if spec.get("holderIdentity") != self._identity:
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = _now()
        spec.update(holderIdentity=self._identity, renewTime=_now(), leaseDurationSeconds=self._duration())
        return lease

    def _first_lease(self) -> Json:
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": LEASE_NAME, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "acquireTime": _now(),
                "renewTime": _now(),
                "leaseDurationSeconds": self._duration(),
                "leaseTransitions": 0,
            },
        }

    def _duration(self) -> int:
        return max(1, round(self._times.duration_seconds))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
