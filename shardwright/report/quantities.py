"""Bytes, seconds and shapes as people read them: three significant digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def bytes_text(count: int) -> str:
    """A number of bytes in decimal units: ``1536`` is ``1.54 kB``."""
    return _scaled(count, _BYTES)


def seconds_text(seconds: float) -> str:
    """A duration: ``0.0123`` is ``12.3 ms``."""
    return _scaled(seconds, _SECONDS)


def tensor_text(dtype: str, shape: Sequence[int]) -> str:
    """A tensor's type: ``f32[8, 128]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def count_text(number: int, noun: str) -> str:
    """A number and its noun: ``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _scaled(amount: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next((row for row in units if abs(amount) >= row[0]), units[-1])
    scaled = amount / size
    if scaled == 0 or (float(scaled).is_integer() and abs(scaled) < 1000):
        return f"{scaled:.0f} {unit}"
    digits = max(0, 3 - len(str(int(abs(scaled)))))
    return f"{scaled:.{digits}f} {unit}"
