"""Files of plans: JSON with a line for each field.

What is read equals what was written; a file is there whole or not at all; what cannot be read is
one PlanError that names the file, the place and what to do.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shardwright.atomic import read_whole, replacing
from shardwright.errors import PlanError

PLAN_VERSION = 1
"""Of the format; a file of a later version is refused."""

MAKE = "make one with Plan.save or shardwright plan -o"

P = TypeVar("P", bound=msgspec.Struct)


def write_plan(path: Path, plan: msgspec.Struct) -> None:
    """Write a plan. Raises PlanError where it holds what JSON cannot, WriteError."""
    fields: dict[str, Any] = {"version": PLAN_VERSION, **msgspec.to_builtins(plan)}
    _check_numbers(fields, "the plan")
    lines = (f"{json.dumps(name)}: {_text(value)}" for name, value in fields.items())
    with replacing(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_plan(path: Path, kind: type[P]) -> P:
    """The plan in a file. Raises PlanError."""
    fields = _fields(path)
    _check_version(path, fields.pop("version", None))
    if fields.pop("copies", None):  # of versions in which stages could compute nodes again
        raise PlanError(f"{path} has stages compute nodes again, which ended; plan again")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where = f" at {place.rstrip('`').removeprefix('.')}" if place else ""
        raise PlanError(f"{path}{where}: {what}; plan again, or mend the file") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}; plan again, or mend the file") from None


def _fields(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_whole(path))
    except OSError as error:
        raise PlanError(f"no plan can be read from {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is no plan, or was cut short: {error}; {MAKE}") from None
    if isinstance(found, dict) and "supertasks" in found and "assignments" not in found:
        raise PlanError(f"{path} is a pipeline file, no plan: it is run, not planned with; {MAKE}")
    if not isinstance(found, dict):
        raise PlanError(f"{path} is no plan: it holds a {type(found).__name__}, not an object")
    return found


def _check_version(path: Path, version: Any) -> None:
    if type(version) is int and version > PLAN_VERSION:
        raise PlanError(
            f"{path} is a plan of version {version}, this shardwright reads {PLAN_VERSION}; "
            "upgrade shardwright, or plan again"
        )
    if type(version) is not int or version < 1:
        raise PlanError(
            f"{path} is no plan: its version is {version!r}, expected {PLAN_VERSION}; {MAKE}"
        )


def _text(value: Any) -> str:
    """JSON, with a line for each object of a list."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def _check_numbers(value: Any, place: str) -> None:
    """Raise PlanError at a float that JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{place} holds {value!r}, which a file cannot: it must be a finite number")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_numbers(item, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_numbers(item, f"{place}[{i}]")
