"""Files: written so that they are there whole or not at all, read where they are files at all."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from shardwright.errors import WriteError

_WORKING_FOLDER = -100
"""AT_FDCWD of Linux's fcntl.h: relative paths are from the working directory."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux's fs.h."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside ``path`` to write to; it becomes ``path`` if the block succeeds.

    Who may read it is what the umask says, whatever the writer makes of it. Raises WriteError,
    also for an OSError of the block.
    """
    temporary = _beside(path)
    mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(mode)  # safetensors puts a file of its own there, closed to others
        os.replace(temporary, path)
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def exchange(path: Path, other: Path) -> bool:
    """Let two paths change places, so that neither is ever missing; whether the system can."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(
        _WORKING_FOLDER, os.fsencode(path), _WORKING_FOLDER, os.fsencode(other), _EXCHANGE
    )
    return done == 0


def read_whole(path: Path, most: int = 1 << 30) -> bytes:
    """The bytes of a regular file of at most ``most`` bytes. Raises OSError.

    Whatever else a path may name (a pipe, a device) has no end or never begins.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = b"" if found.st_size > most else file.read(most + 1)
        if max(found.st_size, len(content)) > most:
            raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
        return content


def cache_folder() -> Path:
    """Where what can be made again is kept from process to process."""
    if asked := os.environ.get("SHARDWRIGHT_CACHE"):
        return Path(asked)
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(shared) / "shardwright"


def check_writable(path: Path) -> None:
    """Raise WriteError where `replacing` could put no file: before any work."""
    _beside(path).unlink()


def _beside(path: Path) -> Path:
    """An empty file beside ``path``. Raises WriteError."""
    if path.is_dir():
        raise WriteError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a file in its place would be no device any more
        raise WriteError(errno.EEXIST, "A device or pipe stands there, no file", str(path))
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    try:
        temporary.touch()
    except OSError as error:
        raise WriteError(error.errno, error.strerror, str(path)) from None
    return temporary
