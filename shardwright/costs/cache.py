"""Measurements that are kept from one run to the next.

Input: a key, by which a unit is known, and the machine that it was measured on. Output: its
`Timing`, if it was measured there before with as many samples. The file is JSON in the user's cache
directory, or where the caller wants it.

Invariant: the file is whole or not there at all; what other processes have added is kept;
what failed is never in it; a file that does not read is an error that says which to delete.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from shardwright.atomic import replacing
from shardwright.costs.timing import Timing
from shardwright.errors import ProfileError

FILE = Path("shardwright") / "timings.json"


class _CacheFile(msgspec.Struct, forbid_unknown_fields=True):
    """What is in the file: by machine, then by key."""

    version: Literal[1]
    timings: dict[str, dict[str, Timing]]


class Cache:
    """The timings of one machine in one file; ``path`` None keeps them in this object alone."""

    def __init__(self, path: Path | None, machine: str) -> None:
        self.path = path
        self._machine = machine
        self._known = _read(path).timings.get(machine, {})
        self._new: dict[str, Timing] = {}

    @classmethod
    def of(cls, wanted: bool | str | Path, machine: str) -> Cache:
        """The cache that a user asks for: True for the usual place, False for none, or a path.

        Raises ProfileError where the file is there but does not read.
        """
        if isinstance(wanted, bool):
            return cls(usual_path() if wanted else None, machine)
        return cls(Path(wanted), machine)

    def find(self, key: str, samples: int) -> Timing | None:
        """The timing of a unit, if it was measured with ``samples`` samples or more."""
        found = self._new.get(key) or self._known.get(key)
        return found if found is not None and found.samples >= samples else None

    def add(self, key: str, timing: Timing) -> None:
        """Take in a timing; `save` writes it."""
        self._new[key] = timing

    def save(self) -> None:
        """Add what is new to the file. Raises ProfileError where it cannot be written."""
        if self.path is None or not self._new:
            return
        content = _read(self.path)
        content.timings.setdefault(self._machine, {}).update(self._new)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_bytes(msgspec.json.encode(content))
        except OSError as error:
            raise ProfileError(_elsewhere(self.path, "written", error)) from error


def usual_path() -> Path:
    """The file in the user's cache directory: ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / FILE


def _read(path: Path | None) -> _CacheFile:
    """What is in a file; nothing where there is none. Raises ProfileError."""
    try:
        content = path.read_bytes() if path is not None else None
    except FileNotFoundError:
        content = None
    except OSError as error:
        raise ProfileError(_elsewhere(path, "read", error)) from error
    if content is None:
        return _CacheFile(1, {})
    try:
        return msgspec.json.decode(content, type=_CacheFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(
            f"the cache of measurements {path} is broken ({error}); delete this file, and what is "
            "needed is measured again"
        ) from None


def _elsewhere(path: Path | None, done: str, error: OSError) -> str:
    return (
        f"the cache of measurements {path} cannot be {done}: {error.strerror}; give another file "
        "(cache=path), or none (cache=False)"
    )
