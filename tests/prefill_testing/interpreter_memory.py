"""What a launch in the Triton interpreter may touch: bounds, and the races that one-by-one programs would hide.

`triton_interpreter` makes one LaunchMemory per launch and asks it at every load and store. The traps: an over-read inside the
same tensor is no fault here, and neither is a race between a load and an earlier program's atomic.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor

_OPEN_TO_ALL: list[tuple[int, int]] = []


class MemoryFault(AssertionError):
    """A kernel touched memory that a GPU would not let it touch, or in an order that a GPU would not keep."""


@contextmanager
def memory_at(address: int, num_bytes: int) -> Iterator[None]:
    """Lets kernels touch memory that no tensor of the launch covers (a bare address among the arguments)."""
    span = (address, address + num_bytes)
    _OPEN_TO_ALL.append(span)
    try:
        yield
    finally:
        _OPEN_TO_ALL.remove(span)


class LaunchMemory:
    """Owner of what one launch knows: the spans of its tensors, and the program that wrote each address.

    tensors: all that were passed. A view opens only its own span, not all of its storage.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        spans = _merged([span for tensor in tensors if (span := _span(tensor))] + _OPEN_TO_ALL)
        self._starts = np.array([start for start, _ in spans], np.uint64)
        self._ends = np.array([end for _, end in spans], np.uint64)
        self._writers: dict[int, np.ndarray] = {}

    def load(self, addresses: np.ndarray, item_bytes: int, program: int) -> None:
        """Raises MemoryFault if a lane is out of bounds or reads what another program of this launch has written."""
        if addresses.size:
            spans = self._spans_of(addresses, item_bytes, program, "load")
            self._check_writers(addresses, spans, program, "reads what program {} has written")

    def store(self, addresses: np.ndarray, item_bytes: int, program: int) -> None:
        """Raises MemoryFault if a lane is out of bounds or another program of this launch has written there."""
        if not addresses.size:
            return
        spans = self._spans_of(addresses, item_bytes, program, "store")
        self._check_writers(addresses, spans, program, "writes where program {} has written")
        for index in np.unique(spans).tolist():
            if index not in self._writers:
                self._writers[index] = np.full(int(self._ends[index] - self._starts[index]), -1, np.int32)
            self._writers[index][addresses[spans == index] - self._starts[index]] = program

    def atomic(self, addresses: np.ndarray, item_bytes: int, program: int) -> None:
        """Bounds only: atomics of several programs may meet."""
        if addresses.size:
            self._spans_of(addresses, item_bytes, program, "atomic")

    def _spans_of(self, addresses: np.ndarray, item_bytes: int, program: int, what: str) -> np.ndarray:
        """Index of the span of each address."""
        if not self._starts.size:
            raise MemoryFault(f"{what} in program {program}: no tensor was passed to this launch")
        spans = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        # The difference wraps for an address below the first span.
        room = self._ends[np.maximum(spans, 0)] - addresses
        bad = (spans < 0) | (addresses + np.uint64(item_bytes) > self._ends[np.maximum(spans, 0)])
        if bad.any():
            worst = int((-room[bad].astype(np.int64)).max()) + item_bytes
            raise MemoryFault(
                f"{what} in program {program}: {int(bad.sum())} of {addresses.size} active lanes out of bounds, up to {worst} "
                "bytes behind the end of the tensor below"
            )
        return spans

    def _check_writers(self, addresses: np.ndarray, spans: np.ndarray, program: int, message: str) -> None:
        for index, writers in self._writers.items():
            found = writers[addresses[spans == index] - self._starts[index]]
            others = found[(found >= 0) & (found != program)]
            if others.size:
                fault = message.format(int(others[0]))
                raise MemoryFault(
                    f"race: program {program} {fault} ({others.size} lanes); on a GPU they run in any order"
                )


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """[first byte, end) of the elements of a tensor; None if it has none."""
    if not tensor.numel():
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending, overlapping ones joined."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
