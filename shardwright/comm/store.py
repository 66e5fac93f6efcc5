"""Where the ranks of one machine meet: a key-value store in a file that only they have.

Whoever starts the ranks makes the file and hands them its descriptor by inheritance. There is no
port to connect to. On Linux the file is in memory and has no name either, and what reaches it are
the descriptors alone; elsewhere it is a temporary file that only its user may open.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from typing import IO

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_PATH_BYTES = 1024
"""The longest path that macOS gives (MAXPATHLEN)."""


def make_store() -> IO[bytes]:
    """The file of a new store; the store is gone when the last process has closed it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("shardwright-store"), "r+b")
    return tempfile.NamedTemporaryFile()


def open_store(descriptor: int) -> Store:
    """The store in a file of `make_store`, which stays open as long as the store is used."""
    store: Store = dist.FileStore(_path_of(descriptor))  # type: ignore[attr-defined]
    return store


def _path_of(descriptor: int) -> str:
    """A path by which this process opens a file once more: locks are held by opened files."""
    if sys.platform == "darwin":
        found = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(_PATH_BYTES))
        return os.fsdecode(found.rstrip(b"\0"))
    return f"/proc/self/fd/{descriptor}"
