"""The graphs of a document's compute supertasks: as texts that rules read, and decoded.

`read_text` gives what the rules need to know of a supertask's data, whatever its kind; an operator
that is not registered here is named, not needed. Only decoding (`TaskGraphs`) needs it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import msgspec
from msgspec import Struct

from shardwright.clusters.device import DeviceKind
from shardwright.errors import ExecError, GraphError
from shardwright.ir import IRGraph
from shardwright.kernels.files import decode as decode_lowered
from shardwright.kernels.lowered import BY_NAME, kind_of
from shardwright.pipeline.fxtext import MadeTensor, decode, parse
from shardwright.pipeline.proof import prove
from shardwright.pipeline.schema import Document, TensorInfo
from shardwright.pipeline.serialize import check_json


class TaskGraphs:
    """The graphs of one document's compute supertasks, each decoded once.

    Supertasks that share a text and bind tensors of equal shapes, dtypes and strides have one graph
    and one `key`.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._graphs: dict[Hashable, IRGraph] = {}

    def key(self, task: str) -> Hashable:
        """What supertasks have alike that have one graph."""
        infos = self._inputs(task)
        kinds = tuple((info.shape, info.dtype, info.strides) for info in infos)
        return self._document.data_of(task), kinds

    def of(self, task: str) -> IRGraph:
        """A supertask's graph. Raises GraphError where its text is not one."""
        key = self.key(task)
        if key not in self._graphs:
            data = self._document.data_of(task)
            self._graphs[key] = decode(data, self._inputs(task), name=task)
        return self._graphs[key]

    def _inputs(self, task: str) -> list[TensorInfo]:
        return [self._document.tensors[name] for name in self._document.supertasks[task].inputs]


# --- texts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskText:
    """A text, read and found to be one.

    inputs
        The names of its placeholders.
    results
        Each output as what is made, or as the position of the input that it is.
    operators
        The operators that it calls by name, each with the first node or call that does.
    prove
        Proves all of it for given inputs and a kind of slot. Raises GraphError.
    takes
        What each input must be, where the text says it.
    """

    inputs: tuple[str, ...]
    results: tuple[MadeTensor | int, ...]
    operators: Mapping[str, str]
    prove: Callable[[Sequence[TensorInfo], DeviceKind], None]
    takes: tuple[MadeTensor, ...] | None = None


def read_text(kind: str, data: str) -> TaskText:
    """The data of a compute supertask of this kind. Raises GraphError, PipelineError."""
    text = _read_fx(data) if kind == "FX" else _read_lowered(data)
    check_json(data)
    return text


def _read_fx(data: str) -> TaskText:
    text = parse(data)
    operators = {node.op: node.name for node in reversed(text.nodes)}
    return TaskText(text.inputs, tuple(text.results()), operators, partial(prove, data))


class _LoweredCall(Struct, frozen=True):
    """What of a call tells which operator it calls by name."""

    kind: int
    schema: int
    blob: str = ""


class _LoweredOutline(Struct, frozen=True):
    """What of a text is known without knowing any operator."""

    version: Literal[1]
    inputs: int
    values: tuple[MadeTensor, ...]
    calls: tuple[_LoweredCall, ...]
    outputs: tuple[int, ...]


def _read_lowered(data: str) -> TaskText:
    """The text of a lowered graph. Raises GraphError where it is none."""
    try:
        outline = msgspec.json.decode(data, type=_LoweredOutline)
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
        lambda infos, slot: _prove_lowered(data),
        values[:count],
    )


def _operator(call: _LoweredCall) -> str | None:
    """The operator of a generic call."""
    if call.kind != BY_NAME["generic"].id:
        return None
    attrs = kind_of(call.kind).unpack(call.schema, base64.b64decode(call.blob, validate=True))
    found: str = attrs["op"]
    return found


@lru_cache(maxsize=1024)
def _prove_lowered(data: str) -> None:
    try:
        decode_lowered(data)
    except ExecError as error:
        raise GraphError(str(error)) from None
