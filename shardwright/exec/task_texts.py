"""The text of a ``dfg`` supertask as the rules of a pipeline file see it (`pipeline.task_texts`).

Comes in: a supertask's data. Goes out: a `TaskText`: what it takes, makes and calls by name. What
always holds: an operator that is not registered here is named, not needed; only building the graph
needs it.
"""

from __future__ import annotations

import base64
import binascii
from functools import lru_cache
from typing import Literal

import msgspec
from msgspec import Struct

from shardwright.errors import ExecError, GraphError
from shardwright.exec.files import decode
from shardwright.exec.kinds import BY_NAME, kind_of
from shardwright.pipeline.fxtext import Made
from shardwright.pipeline.task_texts import TaskText


class _Call(Struct, frozen=True):
    """What of a call tells which operator it calls by name."""

    kind: int
    schema: int
    blob: str = ""


class _Outline(Struct, frozen=True):
    """What of a text is known without knowing any operator."""

    version: Literal[1]
    inputs: int
    values: tuple[Made, ...]
    calls: tuple[_Call, ...]
    outputs: tuple[int, ...]


def read_task(data: str) -> TaskText:
    """The text of a lowered graph. Raises GraphError where it is none."""
    try:
        outline = msgspec.json.decode(data, type=_Outline)
        called = [(f"call {k}", _operator(call)) for k, call in enumerate(outline.calls)]
        operators = {op: name for name, op in reversed(called) if op is not None}
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise GraphError(f"this is not the text of a lowered graph: {error}") from None
    except (binascii.Error, ValueError, ExecError) as error:
        raise GraphError(f"a call's attributes cannot be read: {error}") from None
    count, values = outline.inputs, outline.values
    if not 0 <= count <= len(values) or any(not 0 <= k < len(values) for k in outline.outputs):
        raise GraphError(
            f"{count} inputs and the outputs {list(outline.outputs)} of {len(values)} values"
        )
    return TaskText(
        tuple(f"i{k}" for k in range(count)),
        tuple(k if k < count else values[k] for k in outline.outputs),
        operators,
        lambda infos, slot: _prove(data),
        values[:count],
    )


def _operator(call: _Call) -> str | None:
    """The operator of a generic call."""
    if call.kind != BY_NAME["generic"].id:
        return None
    attrs = kind_of(call.kind).unpack(call.schema, base64.b64decode(call.blob, validate=True))
    found: str = attrs["op"]
    return found


@lru_cache(maxsize=1024)
def _prove(data: str) -> None:
    try:
        decode(data)
    except ExecError as error:
        raise GraphError(str(error)) from None
