"""Seconds, shapes and counts as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def seconds_text(seconds: float) -> str:
    """A duration to three digits: ``0.0123`` is ``12.3 ms``."""
    rounded = float(f"{seconds:.3g}")
    size, unit = next((row for row in _SECONDS if rounded >= row[0]), _SECONDS[-1])
    scaled = rounded / size
    return f"{scaled:.0f} {unit}" if scaled >= 1000 else f"{scaled:.3g} {unit}"


def tensor_text(dtype: str, shape: Sequence[int]) -> str:
    """A tensor's type: ``f32[8, 128]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def count_text(number: int, noun: str) -> str:
    """A number and its noun: ``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
