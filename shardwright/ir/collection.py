"""Garbage collection that waits until a burst of work is done.

Rewriting and planning make many small objects and drop them at once, by their reference counts; a
collector that walks all that the process holds every few thousand of them, models and captured
graphs among it, takes more time than the work (twice as long, for a training step of 64 layers).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect nothing inside; afterwards as before. May be nested."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
