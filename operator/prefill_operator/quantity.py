"""Kubernetes quantities of the API, e.g. 64Gi: their types in the structs and their exact value.

A spec keeps quantities as the user wrote them (int or str), so that they render unchanged.
"""

import re
from fractions import Fraction
from typing import Annotated

from msgspec import Meta

BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?$"
"""Sizes in bytes: no sign, no exponent, no fractions of a byte."""
RESOURCE_PATTERN = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE])?$"
"""Amounts of any resource: as above and thousandths, e.g. 500m of a CPU."""

ByteQuantity = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=BYTES_PATTERN)]
ResourceQuantity = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=RESOURCE_PATTERN)]

_POWERS = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", start=1)},
}


def quantity_value(quantity: int | str) -> Fraction:
    """Exact value, e.g. "500m" -> 1/2, "2500M" -> 2500000000.

    Raises:
        ValueError: not a quantity of RESOURCE_PATTERN.
    """
    if isinstance(quantity, int):
        return Fraction(quantity)
    if not re.fullmatch(RESOURCE_PATTERN, quantity):
        raise ValueError(f"{quantity!r} is no quantity; expected for example 500m, 8 or 64Gi")
    digits = re.match(r"[0-9.]+", quantity)
    assert digits is not None
    return Fraction(digits[0]) * _POWERS[quantity[digits.end() :]]


def quantity_bytes(quantity: int | str) -> int:
    """Whole bytes, rounded up as Kubernetes does."""
    value = quantity_value(quantity)
    return -(-value.numerator // value.denominator)
