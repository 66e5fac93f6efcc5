"""Measurements as a JSON file, and back.

Input: a Struct with its ``version``, or the path of a file. Output: the file, or what is in
it. Invariant: a file is there whole or not at all; what does not read is one ProfileError
that names the file, what was found and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from shardwright.atomic import read_whole, replacing
from shardwright.errors import ProfileError

S = TypeVar("S", bound=msgspec.Struct)


def write_stored(path: str | Path, content: msgspec.Struct) -> None:
    """Write it. Raises WriteError."""
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(text + b"\n")


def read_stored(path: str | Path, kind: type[S], what: str, writer: str) -> S:
    """The ``kind`` in a file. Raises ProfileError, which says ``what`` is missing.

    ``writer`` is what writes such a file.
    """
    try:
        return msgspec.json.decode(read_whole(Path(path)), type=kind)
    except OSError as error:
        reason = error.strerror or error
        raise ProfileError(f"no {what} can be read from {path}: {reason}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(
            f"{path} is no {what}, or one of another version: {error}; write it with {writer}"
        ) from None
