"""Packed attributes: the constants of a kernel call as the bytes of a blob.

An id never changes its meaning, a schema never its layout; a new need is a new schema. Schema 0 is
the call with default attributes and an empty blob. Schemas of another number have a blob,
little-endian and without padding, that is read whole or refused:

    code    field                               bytes
    B       whole number below 256, or a flag   1
    i, q    whole number                        4, 8
    d       float                               8
    q*, d*  tuple of numbers                    u32 count, then 8 each
    s       text, UTF-8                         u32 length, then so many
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import ExecError


@dataclass(frozen=True, slots=True)
class AttrSchema:
    """The fields of a blob in order, by their codes, and their values where none is given.

    No fields: an empty blob.
    """

    codes: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The values as bytes. Raises ExecError where one is missing, unknown or does not fit."""
        if set(values) != set(self.codes):
            raise ExecError(f"attributes {sorted(values)}; the schema has {sorted(self.codes)}")
        parts = []
        for name, code in self.codes.items():
            try:
                parts.append(_pack(code, values[name]))
            except (struct.error, TypeError, AttributeError) as error:
                raise ExecError(f"attribute {name}={values[name]!r}: {error}") from None
        return b"".join(parts)

    def unpack(self, blob: bytes) -> dict[str, Any]:
        """The values by name. Raises ExecError where the blob is shorter or longer."""
        values, at = {}, 0
        for name, code in self.codes.items():
            try:
                values[name], at = _unpack(code, blob, at)
            except (struct.error, UnicodeDecodeError) as error:
                raise ExecError(
                    f"a blob of {len(blob)} bytes ends in attribute {name!r}: {error}"
                ) from None
        if at != len(blob):
            raise ExecError(f"a blob of {len(blob)} bytes; the schema's fields take {at}")
        return values


def _pack(code: str, value: Any) -> bytes:
    if code == "s":
        data: bytes = value.encode()
        return struct.pack("<I", len(data)) + data
    if code.endswith("*"):
        return struct.pack(f"<I{len(value)}{code[0]}", len(value), *value)
    return struct.pack(f"<{code}", value)


def _unpack(code: str, blob: bytes, at: int) -> tuple[Any, int]:
    """A field's value, and where the next begins."""
    if code == "s" or code.endswith("*"):
        (count,) = struct.unpack_from("<I", blob, at)
        form = f"<{count}s" if code == "s" else f"<{count}{code[0]}"
        found = struct.unpack_from(form, blob, at + 4)
        end = at + 4 + struct.calcsize(form)
        return (found[0].decode() if code == "s" else found), end
    (value,) = struct.unpack_from(f"<{code}", blob, at)
    return value, at + struct.calcsize(f"<{code}")


def attributes(**fields: str | tuple[str, Any]) -> AttrSchema:
    """A schema from codes, or from pairs of a code and a default."""
    pairs = {name: item for name, item in fields.items() if isinstance(item, tuple)}
    codes = {name: item if isinstance(item, str) else item[0] for name, item in fields.items()}
    return AttrSchema(codes, {name: default for name, (_, default) in pairs.items()})
