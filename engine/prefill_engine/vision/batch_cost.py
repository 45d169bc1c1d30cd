"""Time of a batch as a + b * patches, fitted to the batches of late. Owned by encode_queue; read by load, health, retry_after."""

from collections import deque

_KEPT_BATCHES = 64


class BatchCost:
    """Owner of the last batches' sizes and times, in patches and milliseconds."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=_KEPT_BATCHES)

    def note(self, *, patches: int, ms: float) -> None:
        self._batches.append((patches, ms))

    def fit(self) -> tuple[float, float]:
        """(a in ms, b in ms per patch), both >= 0; (0, 0) before the first batch. Sizes that hardly differ give b alone."""
        count = len(self._batches)
        if not count:
            return 0.0, 0.0
        mean_patches = sum(patches for patches, _ in self._batches) / count
        mean_ms = sum(ms for _, ms in self._batches) / count
        spread = sum((patches - mean_patches) ** 2 for patches, _ in self._batches)
        if spread <= 0.01 * count * mean_patches**2:
            return 0.0, mean_ms / mean_patches
        slope = sum((patches - mean_patches) * (ms - mean_ms) for patches, ms in self._batches) / spread
        slope = min(max(slope, 0.0), mean_ms / mean_patches)
        return mean_ms - slope * mean_patches, slope

    def predicted_ms(self, patches: int, *, batch_patches: int) -> float:
        """Time of so many patches, in batches of batch_patches."""
        a_ms, b_ms = self.fit()
        return -(-patches // batch_patches) * a_ms + patches * b_ms
