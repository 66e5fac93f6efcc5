"""Numbers with units, as files say them: ``80 GB``, ``312 TFLOP/s``, ``5 us``, ``200 Gbit/s``.

A number without a unit is in bytes, seconds, or bytes and operations a second. What always holds:
what `written` writes, `parsed` reads as the same number, to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Literal

from shardwright.errors import PlanError

Quantity = Literal["bytes", "seconds", "bytes a second", "operations a second"]

_PREFIXES = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_DECIMAL = {prefix: Decimal(1).scaleb(power) for prefix, power in _PREFIXES.items()}
_BINARY = {f"{prefix}i": Decimal(1024**i) for i, prefix in enumerate("KMGTP", start=1)}
_BYTES = {f"{prefix}B": size for prefix, size in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}bit/s": size / 8 for prefix, size in _DECIMAL.items()}

UNITS: Mapping[Quantity, Mapping[str, Decimal]] = {
    "bytes": _BYTES,
    "seconds": {
        "s": Decimal(1),
        "ms": Decimal("1e-3"),
        "us": Decimal("1e-6"),
        "µs": Decimal("1e-6"),
        "ns": Decimal("1e-9"),
    },
    "bytes a second": {f"{unit}/s": size for unit, size in _BYTES.items()} | _BITS,
    "operations a second": {f"{prefix}FLOP/s": size for prefix, size in _DECIMAL.items()},
}
"""The units of each quantity, and what one of them is in the first or in seconds."""

MOST_SECONDS = 1e9
"""Thirty years; sums of what takes longer are no numbers any more."""

_WRITTEN: Mapping[Quantity, tuple[str, ...]] = {
    "bytes": ("TB", "GB", "MB", "kB", "B"),
    "seconds": ("s", "ms", "us", "ns"),
    "bytes a second": ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
    "operations a second": ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "kFLOP/s", "FLOP/s"),
}
"""The units that are written, the largest first."""

_PATTERN = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf)\s*(\S*)")


def parsed(text: str, quantity: Quantity) -> Decimal:
    """The number that a text says. Raises ValueError, which says what was expected."""
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"found {text!r}, expected a number of {quantity}, as {_examples(quantity)}"
        )
    number, unit = found.groups()
    if unit and unit not in UNITS[quantity]:
        raise ValueError(
            f"found the unit {unit!r}, expected one for {quantity}: {', '.join(UNITS[quantity])}"
        )
    try:
        return Decimal(number) * UNITS[quantity].get(unit, 1)
    except ArithmeticError:
        raise ValueError(f"found {text!r}, expected a number that can be counted with") from None


def check_seconds(what: str, seconds: float) -> None:
    """Raise PlanError where something takes longer than any machine stands."""
    if not seconds <= MOST_SECONDS:
        raise PlanError(f"{what} is {seconds:.3g} s; expected {MOST_SECONDS:.0e} s at most")


def written(number: float, quantity: Quantity) -> str:
    """The number in the largest unit of which there is one or more: 5e-6 s is ``5 us``."""
    exact = Decimal(repr(number))
    units = UNITS[quantity]
    fitting = (unit for unit in _WRITTEN[quantity] if exact >= units[unit])
    unit = next(fitting, _WRITTEN[quantity][-1])
    if not exact.is_finite():
        return f"inf {unit}"
    scaled = exact.scaleb(-units[unit].adjusted())
    return f"{scaled.normalize():f} {unit}" if scaled else f"0 {unit}"


def _examples(quantity: Quantity) -> str:
    return " or ".join(f"2.5 {unit}" for unit in _WRITTEN[quantity][1:3])
