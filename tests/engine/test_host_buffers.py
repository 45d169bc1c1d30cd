"""Memory for copies of state: used again, but never while anything still looks at it."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prefill_engine.host_buffers import HostBuffers

NUM_BYTES = 5000


def address_of(data: npt.NDArray[np.uint8]) -> int:
    return data.ctypes.data


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    buffers = HostBuffers()
    first, second = buffers.take(NUM_BYTES), buffers.take(NUM_BYTES)
    addresses = {address_of(first), address_of(second)}
    assert len(addresses) == 2

    del first, second
    again = [buffers.take(NUM_BYTES) for _ in range(2)]

    assert {address_of(data) for data in again} == addresses


VIEWS: dict[str, Callable[[npt.NDArray[np.uint8]], object]] = {
    "array": lambda data: data,
    "slice": lambda data: data[10:20],
    "slice_of_a_slice": lambda data: data[10:20][2:3],
    "shape": lambda data: data.reshape(50, 100)[3],
    "memoryview": lambda data: data.data,
    "part_of_memoryview": lambda data: memoryview(data)[7:9],
    "tensor": torch.from_numpy,
    "part_of_tensor": lambda data: torch.from_numpy(data).view(50, 100)[4:5],
    "array_of_tensor": lambda data: torch.from_numpy(data).view(50, 100).numpy(),
    "array_of_memoryview": lambda data: np.frombuffer(data.data[3:], dtype=np.uint8),
}


@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
def test_any_view_keeps_memory_from_being_used_again(view_of: Callable[[npt.NDArray[np.uint8]], object]) -> None:
    buffers = HostBuffers()
    data = buffers.take(NUM_BYTES)
    address = address_of(data)
    view = view_of(data)

    del data
    other = buffers.take(NUM_BYTES)
    assert address_of(other) != address
    del other, view

    assert address in {address_of(data) for data in [buffers.take(NUM_BYTES), buffers.take(NUM_BYTES)]}


def test_sizes_are_kept_apart() -> None:
    buffers = HostBuffers()
    address = address_of(buffers.take(NUM_BYTES))

    other = buffers.take(NUM_BYTES - 1)

    assert other.nbytes == NUM_BYTES - 1
    assert address_of(buffers.take(NUM_BYTES)) == address


def test_a_burst_leaves_no_more_than_a_few() -> None:
    buffers = HostBuffers()
    burst = [buffers.take(NUM_BYTES) for _ in range(40)]
    addresses = {address_of(data) for data in burst}

    burst.clear()
    for data in (kept := [buffers.take(NUM_BYTES) for _ in range(8)]):
        data[:] = 1

    assert {address_of(data) for data in kept} <= addresses
    assert sum(map(len, buffers._free.values())) == 0
