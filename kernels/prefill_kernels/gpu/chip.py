"""Which chip a kernel set runs on: picks tile sizes and number formats, never results' meaning (decisions 21, C24)."""

from enum import Enum

import torch


class Chip(Enum):
    """Compute capability of the supported chips. The interpreter can play either."""

    SM_90 = 90
    """H100, H200, H20: bf16 products on exactly dequantised operands."""
    SM_100 = 100
    """B200, GB300: block-scaled products on codes and scales."""


def chip_of(device: torch.device) -> Chip:
    """The chip of a CUDA device.

    Raises:
        ValueError: no kernel configuration for its compute capability.
    """
    major, minor = torch.cuda.get_device_capability(device)
    match major:
        case 9:
            return Chip.SM_90
        case 10:
            return Chip.SM_100
        case _:
            raise ValueError(
                f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}: expected 9.x or 10.x"
            )
