"""Every test of this folder runs its kernels in the repaired Triton interpreter, on CPU tensors.

In this process only and only while such a test runs: other tests of the session and child processes see triton as it is.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from prefill_testing.triton_interpreter import interpreted


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty, empty_like, empty_strided, new_empty and new_empty_strided give NaN, or bytes 0xA5 in other dtypes."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) or not tensor.is_floating_point():
                tensor.untyped_storage().fill_(0x01 if tensor.dtype == torch.bool else 0xA5)
            else:
                tensor.fill_(float("nan"))
            return tensor

        return made

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
