"""Host memory for copies of window state, used again as soon as nobody refers to a copy any more.

Used by KvCache on the step thread: fresh memory costs a page fault every 4 KiB, more than the copy into it. The trap: a buffer is
given back when the last view of it is gone, so whoever keeps an address must keep a view as well.
"""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

_MOST_FREE = 8  # of each size: what a burst of finished prompts leaves, 36 MB of the released model


class HostBuffers:
    """Buffers of a few sizes. Thread-safe: the last view may go in any thread."""

    def __init__(self) -> None:
        self._free: dict[int, deque[bytearray]] = {}

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """[num_bytes], for the caller alone; holds anything. Memoryviews, tensors and slices of it keep it."""
        free = self._free.setdefault(num_bytes, deque(maxlen=_MOST_FREE))
        try:
            memory = free.pop()
        except IndexError:
            memory = bytearray(num_bytes)
        # An array whose base is no array: numpy lets slices refer to it, and not past it to the memory.
        lent = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(lent, free.append, memory).atexit = False
        return lent
