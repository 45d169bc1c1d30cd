"""How far a checkpoint load is, and its two displays: a bar with ETA on a terminal, one log line per shard elsewhere.

weights.py reports LoadProgress; `console_progress` is for CLI verbs, a rank forwards the values to its front. No torch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Reported after each piece read (at most 64 MiB) and after each shard. Byte counts are of this rank's own part."""

    shard: int
    """1-based."""
    num_shards: int
    name: str
    """File name of the shard."""
    shard_done: bool
    done_bytes: int
    total_bytes: int


def console_progress(stream: TextIO) -> Callable[[LoadProgress], None]:
    """A reporter for load_parameters: a bar on `stream` if it is a terminal, else one INFO line per finished shard."""
    return _bar(stream) if stream.isatty() else _log_shard


def _log_shard(progress: LoadProgress) -> None:
    if progress.shard_done:
        logger.info(
            "checkpoint shard loaded",
            extra={
                "shard": progress.shard,
                "num_shards": progress.num_shards,
                "file": progress.name,
                "done_bytes": progress.done_bytes,
                "total_bytes": progress.total_bytes,
            },
        )


def _bar(stream: TextIO) -> Callable[[LoadProgress], None]:
    bar = tqdm(total=None, unit="B", unit_scale=True, unit_divisor=1024, file=stream, desc="loading")

    def report(progress: LoadProgress) -> None:
        bar.total = progress.total_bytes
        bar.set_description(f"loading shard {progress.shard}/{progress.num_shards}", refresh=False)
        bar.update(progress.done_bytes - bar.n)
        if progress.shard_done and progress.shard == progress.num_shards:
            bar.close()

    return report
