"""Counts, bytes, seconds and types of tensors as people read them."""

from __future__ import annotations

from collections.abc import Sequence

MILLISECOND = 1e-3
"""Seconds."""
_SECONDS = ((1.0, "s"), (MILLISECOND, "ms"), (1e-6, "µs"))


def count_text(number: int, noun: str) -> str:
    """A number and its noun: ``1 tensor``, ``2 tensors``, ``2 batches``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def format_bytes(count: int) -> str:
    """A number of bytes with a decimal unit: ``512 B``, ``1.2 kB``, ``90.9 MB``."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def seconds_text(seconds: float) -> str:
    """A duration to three digits: ``0.0123`` is ``12.3 ms``."""
    rounded = float(f"{seconds:.3g}")
    size, unit = next((row for row in _SECONDS if rounded >= row[0]), _SECONDS[-1])
    scaled = rounded / size
    return f"{scaled:.0f} {unit}" if scaled >= 1000 else f"{scaled:.3g} {unit}"


def tensor_text(dtype: str, shape: Sequence[int]) -> str:
    """A tensor's type: ``f32[8, 128]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"
