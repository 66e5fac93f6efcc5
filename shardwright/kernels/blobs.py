"""Packed attributes: how a call's constants become bytes, and come back.

Comes in: a `Layout`, one schema of a kind, and values by field name. Goes out: the ``attr_blob`` of
a lowered call: little-endian, without padding, in the layout's order. What always holds: a blob is
read whole or refused; bytes that are missing or left over are an error, never a default.

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
from dataclasses import dataclass
from typing import Any

from shardwright.errors import ExecError


@dataclass(frozen=True, slots=True)
class Layout:
    """One schema of a kind: its fields in order, and their codes. No fields: an empty blob."""

    fields: Mapping[str, str]

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The values as bytes. Raises ExecError where one is missing, unknown or does not fit."""
        if set(values) != set(self.fields):
            raise ExecError(f"attributes {sorted(values)}; the schema has {sorted(self.fields)}")
        parts = []
        for name, code in self.fields.items():
            try:
                parts.append(_pack(code, values[name]))
            except (struct.error, TypeError, AttributeError) as error:
                raise ExecError(f"attribute {name}={values[name]!r}: {error}") from None
        return b"".join(parts)

    def unpack(self, blob: bytes) -> dict[str, Any]:
        """The values by name. Raises ExecError where the blob is shorter or longer."""
        values, at = {}, 0
        for name, code in self.fields.items():
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
