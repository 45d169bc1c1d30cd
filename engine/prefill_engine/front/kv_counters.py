"""Turns a rank's monotonic KV counts into the metric families of kv.md 7.7. Called by Telemetry with every load report.

The trap: a rank reports totals, and a report may span several swap-ins: sums and counts of a family are exact, single values are
not known, so no histogram is made of them.
"""

from collections.abc import Mapping

from prometheus_client import Counter

from prefill_engine.metrics import Metrics

_US = 1e-6
_MODES = ("exact", "pulling", "replay", "miss")
_ENDINGS = ("whole", "short", "late", "gone", "lost", "given_up")
_CUT_ENDINGS = ("short", "late", "gone", "lost")
_GROUP_SUM, _GROUP_COUNT, _STALL = "kv_group_ready_us_", "kv_group_ready_count_", "kv_swapin_stall_us_"


class KvCounters:
    """Owner of the totals seen so far."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[tuple[int, str], int] = {}
        self._counters: dict[str, tuple[Counter, ...]] = {
            "kv_hit_tokens": (metrics.kv_hit_tokens,),
            "kv_requested_tokens": (metrics.kv_requested_tokens,),
            "kv_open_late": (metrics.kv_open_late,),
            "kv_open_shrunk": (metrics.hit_shrunk.labels("pressure"),),
            "kv_swapin_bytes": (metrics.kv_loaded_bytes,),
            "kv_gate_poisoned": (metrics.kv_gate_poisoned,),
        }
        self._counters |= {f"kv_open_{mode}": (metrics.kv_open.labels(mode),) for mode in _MODES}
        self._counters |= {f"kv_swapin_{ending}": (metrics.kv_loads.labels(ending),) for ending in _ENDINGS}
        for ending in _CUT_ENDINGS:
            self._counters[f"kv_swapin_{ending}"] += (metrics.hit_shrunk.labels("swap_in"),)
        self._counters |= {f"kv_snapshot_{end}": (metrics.kv_snapshots.labels(end),) for end in ("taken", "lost")}

    def take(self, rank: int, totals: Mapping[str, int]) -> dict[str, int]:
        """Adds what has grown; returns the counts that are no family."""
        others = {}
        for name, total in totals.items():
            grown = max(0, total - self._seen.get((rank, name), 0))
            if name in self._counters:
                for counter in self._counters[name]:
                    counter.inc(grown)
            elif name.startswith(_STALL):
                self._metrics.kv_swapin_stall.labels(name.removeprefix(_STALL)).inc(grown * _US)
            elif name.startswith(_GROUP_COUNT):
                self._observe_group(rank, name.removeprefix(_GROUP_COUNT), grown, totals)
            elif name.startswith(_GROUP_SUM):
                continue  # taken together with its count
            else:
                others[name] = total
                continue
            self._seen[rank, name] = total
        return others

    def _observe_group(self, rank: int, group: str, count: int, totals: Mapping[str, int]) -> None:
        name = _GROUP_SUM + group
        seconds = (totals.get(name, 0) - self._seen.get((rank, name), 0)) * _US
        for _ in range(count):
            self._metrics.kv_group_ready.labels(group).observe(seconds / count)
        if count:
            self._seen[rank, name] = totals.get(name, 0)
