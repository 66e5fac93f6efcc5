"""Calls of C code that prints to the standard output though nobody asked it to.

What always holds: what was printed before such a call is heard, what Python prints after it too;
the output is what it was, however the call ends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

STDOUT = 1
"""The file descriptor that C code prints to, whatever `sys.stdout` is."""
_ONE_AT_A_TIME = Lock()
"""What the output was must be known."""


@contextmanager
def unheard() -> Iterator[None]:
    """Nothing that C code prints to the standard output is heard."""
    library = ctypes.CDLL(None)
    with _ONE_AT_A_TIME:
        library.fflush(None)
        kept = _duplicate(STDOUT)
        try:
            if kept is not None:
                with Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), STDOUT)
            yield
        finally:
            library.fflush(None)
            if kept is not None:
                os.dup2(kept, STDOUT)
                os.close(kept)


def _duplicate(descriptor: int) -> int | None:
    """Another descriptor of the same file; None where it is closed."""
    try:
        return os.dup(descriptor)
    except OSError:
        return None
