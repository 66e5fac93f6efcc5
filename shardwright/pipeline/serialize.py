"""A document as the bytes of a file, and back.

Invariant: ``read(write(document))`` is an equal document, and equal documents have equal
bytes. Reading gives a document whose types are right, or one PipelineError that names the place;
it never imports, evaluates or unpickles anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from shardwright.errors import PipelineError
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import (
    FORMAT_VERSION,
    Device,
    Document,
    MetadataTensor,
    MetadataTensorSlice,
    SuperTask,
    TensorInfo,
)

D = TypeVar("D", bound=Document)

_LINES = ("devices", "tensors", "supertasks", "blobs")
"""Maps of a document that are written with a line an entry."""


def write(document: Document) -> bytes:
    """The bytes of a pipeline file: JSON, with a line for each device, tensor, supertask and blob.

    Raises PipelineError where a field holds what JSON cannot (a Struct made in Python may).
    """
    try:
        _check_numbers(msgspec.to_builtins([document.metadata, document.training]))
        fields = [_field(key, item) for key, item in _fields(document)]
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise broken("type", f"the pipeline cannot be written as JSON: {error}") from None
    return b"{\n" + b",\n".join(fields) + b"\n}\n"


def _check_numbers(data: Any) -> None:
    """Raise ValueError at a float that JSON has no number for; it would be read as None."""
    if isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"it holds the constant {data!r}; write it as FixedFloat({str(data)!r})")
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list | tuple):
        for item in data:
            _check_numbers(item)


def _fields(document: Document) -> Iterator[tuple[str, Any]]:
    """The fields that are written; optional ones are left out where they say nothing."""
    for info in msgspec.structs.fields(Document):
        item = getattr(document, info.name)
        if info.required or item is not None:
            yield info.name, item


def _field(key: str, item: Any) -> bytes:
    name = msgspec.json.encode(key)
    if key not in _LINES or not isinstance(item, dict) or not item:
        return name + b": " + msgspec.json.encode(item)
    entries = (msgspec.json.encode(k) + b": " + msgspec.json.encode(v) for k, v in item.items())
    return name + b": {\n" + b",\n".join(entries) + b"\n}"


def read(data: bytes, kind: type[D]) -> D:
    """The document that the bytes of a file hold. Raises PipelineError."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise broken("json", f"byte {error.start} is not UTF-8; is this a pipeline file?") from None
    check_json(text, "the file")
    return _decode(data, kind)


def reread(document: Document) -> Document:
    """The document as reading its file would give it: types tested, lists as tuples.

    Raises PipelineError where a field is not of its type, as one made in Python may be.
    """
    return _decode(write(document), Document)


def _decode(data: bytes, kind: type[D]) -> D:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise _type_error(json.loads(data), error) from None
    except RecursionError:
        raise broken("json", f"the file {_TOO_DEEP}") from None


_TOO_DEEP = "nests deeper than any pipeline does; it is damaged"


def check_json(text: str, what: str = "the text") -> None:
    """Raise PipelineError where a text is not JSON, or an object has a key twice."""
    try:
        json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        missing = error.pos >= len(text.rstrip())
        problem = f"{what} ends too early; it was cut short" if missing else error.msg
        raise broken(
            "json",
            f"line {error.lineno}, column {error.colno} of {len(text.encode())} bytes: {problem}; "
            "copy or build the file again",
        ) from None
    except ValueError as error:  # A number of more digits than Python reads.
        raise broken("json", f"{what} has a number beyond any size: {error}") from None
    except RecursionError:
        raise broken("json", f"{what} {_TOO_DEEP}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise broken("unique-keys", f"the key {twice!r} stands twice in one object; keep one")
    return found


# --- where a type is wrong ---------------------------------------------------------------------

_ENTRIES: tuple[tuple[tuple[str, ...], type, str | None], ...] = (
    (("devices",), Device, None),
    (("tensors",), TensorInfo, "tensor"),
    (("supertasks",), SuperTask, "task"),
    (("metadata", "tensors", "inputs"), MetadataTensor, "tensor"),
    (("metadata", "tensors", "outputs"), MetadataTensor, "tensor"),
    (("metadata", "tensor_slices", "inputs"), MetadataTensorSlice, "tensor"),
    (("metadata", "tensor_slices", "outputs"), MetadataTensorSlice, "tensor"),
)
"""Maps of a document: where, the type of an entry, and what PipelineError calls its key."""


def _type_error(data: Any, error: msgspec.DecodeError) -> PipelineError:
    """The error that names the entry at fault; msgspec's own leaves keys of maps out."""
    if isinstance(data, dict) and (newer := _newer_version(data)) is not None:
        return newer
    if isinstance(data, dict) and "assignments" in data and "supertasks" not in data:
        return broken("type", "this is a plan, no pipeline; see shardwright build --plan")
    for path, kind, label in _ENTRIES:
        for key, entry in _entries(data, path):
            try:
                msgspec.convert(entry, kind)
            except msgspec.ValidationError as found:
                place = "".join(f".{part}" for part in path) + f"[{key!r}]"
                named = {label: key} if label else {}
                return broken("type", _message(found, f"${place}"), **named)
    return broken("type", _message(error, "$"))


def _newer_version(data: dict[str, Any]) -> PipelineError | None:
    version = data.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        return broken(
            "version",
            f"the file is of format version {version}, this shardwright reads up to "
            f"{FORMAT_VERSION}; upgrade shardwright",
        )
    return None


def _entries(data: Any, path: tuple[str, ...]) -> list[tuple[str, Any]]:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return list(data.items()) if isinstance(data, dict) else []


def _message(error: msgspec.DecodeError, place: str) -> str:
    """msgspec's message with the whole path: ``at $.tensors['x'].dtype: Invalid enum value``."""
    what, _, inside = str(error).partition(" - at `")
    return f"at {place}{inside.rstrip('`').removeprefix('$')}: {what}"
