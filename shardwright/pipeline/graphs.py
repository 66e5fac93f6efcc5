"""The graphs of a document's compute supertasks: as texts that rules read, decoded, and proved.

`read_text` gives what the rules need to know of a supertask's data, whatever its kind; an operator
that is not registered here is named, not needed. Only decoding (`TaskGraphs`) needs it.

`prove` takes the text of an FX graph, the tensors that a supertask binds, and the kind of its slot,
and runs each call once on fake tensors. What holds afterwards: every call runs on what comes to it,
and gives as many tensors as the text says, of the shapes, dtypes and strides that it says. So what
a task makes is in the file, on each way of running.

A graph is proved once for the tensors that it is given: equal layers cost one proof, also in
documents to come, and in processes to come as long as torch and this package stay what they are:
that a proof succeeded is kept in the cache (`cache_folder`), by a hash of all that it depends on.
Equal calls of different graphs are run once. `restated` is for who writes a file: a layer that is
cut out of a program is laid out as what comes to it is, not as it was there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Struct

from shardwright.atomic import cache_folder
from shardwright.devices import DeviceKind
from shardwright.errors import ExecError, GraphError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.inference import Inference
from shardwright.ir.operators import listed_inputs
from shardwright.ir.tensor_meta import TensorMeta, describe_dtype, strides_or_none, tensor_text
from shardwright.ir.trusting import check_shapes
from shardwright.ir.values import Input
from shardwright.kernels.files import decode as decode_lowered
from shardwright.kernels.lowered import BY_NAME, kind_of
from shardwright.pipeline.fxtext import (
    FXNode,
    FXText,
    MadeTensor,
    decode,
    encode,
    parse,
    place_of,
)
from shardwright.pipeline.rules import ONE_KIND
from shardwright.pipeline.schema import Document, DType, TensorInfo
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


# --- proof ----------------------------------------------------------------------------------------


_Taken = tuple[tuple[int, ...], DType, tuple[int, ...] | None]
Kind = tuple[tuple[int, ...], str, tuple[int, ...] | None]
"""What a call may ask of a tensor without its contents: shape, dtype, strides."""

_ONE_AT_A_TIME = Lock()
"""A mode of fake tensors is for one thread."""


def prove(data: str, inputs: Sequence[TensorInfo], slot: DeviceKind = "cpu") -> None:
    """Raise GraphError, with the node, where the text is no graph that makes what it says."""
    with _ONE_AT_A_TIME:
        _prove(data, _taken(inputs), slot)


def _taken(inputs: Sequence[TensorInfo]) -> tuple[_Taken, ...]:
    return tuple((info.shape, info.dtype, info.strides) for info in inputs)


def restated(data: str, inputs: Sequence[TensorInfo], slot: DeviceKind) -> Restated:
    """A text with the strides of what its calls make, whatever it said. Raises GraphError."""
    with _ONE_AT_A_TIME:
        return _restated(data, _taken(inputs), slot)


class Restated(NamedTuple):
    """A text, and the strides of its results; None where these are contiguous."""

    data: str
    strides: tuple[tuple[int, ...] | None, ...]


@lru_cache(maxsize=1024)
def _restated(data: str, inputs: tuple[_Taken, ...], slot: DeviceKind) -> Restated:
    graph = _decoded(parse(data), inputs)
    for node in graph.nodes if slot != "cuda" else ():
        for value_id, found in zip(node.results, _results(graph, node), strict=True):
            if value_id is not None and found is not None:
                value = graph.values[value_id]
                value.meta = TensorMeta(
                    value.shape, value.dtype, strides_or_none(value.shape, found.stride())
                )
    return Restated(encode(graph), tuple(graph.values[k].strides for k in graph.outputs))


@lru_cache(maxsize=1024)
def _prove(data: str, inputs: tuple[_Taken, ...], slot: DeviceKind) -> None:
    text = parse(data)
    mark = _mark(data, inputs, slot) if all(map(_is_fixed, text.nodes)) else None
    if mark is not None and os.path.exists(mark):  # False also where the cache may not be read
        return
    graph = _decoded(text, inputs)
    for node, written in zip(graph.nodes, text.nodes, strict=True):
        try:
            _check_results(graph, node, written, slot)
        except GraphError as error:
            raise GraphError(f"{place_of(written)} {error}", node=written.name) from None
    if mark is not None:
        with suppress(OSError):  # Without a cache that can be written the next process proves anew.
            mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark.touch(mode=0o600)


def _mark(data: str, inputs: tuple[_Taken, ...], slot: DeviceKind) -> Path | None:
    """The file that is there if this was proved before; None where nothing is to be kept."""
    if (folder := _marks()) is None:
        return None
    asked = msgspec.json.encode((data, inputs, slot))
    return folder / hashlib.sha256(asked).hexdigest()


@cache
def _marks() -> Path | None:
    """The folder of the proofs of this torch and these sources; it is emptied where it is full."""
    if os.environ.get(KEEP_VARIABLE, "1") == "0":
        return None
    package = Path(__file__).parent.parent
    found = [(path, path.stat()) for path in sorted(package.rglob("*.py"))]
    states = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]
    named = msgspec.json.encode((str(torch.__version__), sys.version, str(package), states))
    try:
        folder = cache_folder() / "proofs" / hashlib.sha256(named).hexdigest()[:16]
    except RuntimeError:  # a user without a home directory
        return None
    with suppress(OSError):
        if len(os.listdir(folder)) > _MOST_MARKS:
            shutil.rmtree(folder)
    return folder


KEEP_VARIABLE = "SHARDWRIGHT_KEEP_PROOFS"
"""The environment variable that is 0 where proofs are to be kept in this process alone."""
_MOST_MARKS = 10_000
"""Empty files: of some hundred models."""


def _is_fixed(node: FXNode) -> bool:
    """Whether what a call makes depends on torch and this package alone."""
    return node.op.startswith(("aten.", "shardwright."))


def _decoded(text: FXText, inputs: Sequence[_Taken]) -> IRGraph:
    taken = [TensorInfo(shape, dtype, strides=strides) for shape, dtype, strides in inputs]
    return decode(text, taken)


def _results(graph: IRGraph, node: IRNode) -> Sequence[torch.Tensor | None]:
    """What a call makes, on meta."""
    inputs = [graph.values[value_id] for value_id in node.inputs]
    inference = _inference(ONE_KIND.get(node.op, "cpu"))
    check_shapes(node.op, inputs, node.attrs, inference)
    if node.op.startswith(_BY_PLACE) and isinstance(node.attrs.get("self"), list):
        return _by_place(node, inputs, inference)
    return inference.outputs(node.op, inputs, node.attrs)


_BY_PLACE = ("aten._foreach_", "aten._fused_a", "aten._fused_sgd")
"""Operators of an optimizer's step: what they make at a place of a list follows from that place."""


def _by_place(
    node: IRNode, inputs: Sequence[IRValue], inference: Inference
) -> Sequence[torch.Tensor | None]:
    """What an operator on lists makes, run on one of all places that hold equal tensors."""
    count = len(node.attrs["self"])
    lists = {k: v for k, v in node.attrs.items() if isinstance(v, list) and len(v) == count}
    first: dict[object, int] = {}
    same = [
        first.setdefault(tuple(_kind(item[place], inputs) for item in lists.values()), place)
        for place in range(count)
    ]
    kept = sorted(first.values())
    attrs = {
        key: [value[place] for place in kept] if key in lists else value
        for key, value in node.attrs.items()
    }
    direct = len(inputs) - sum(1 for _ in listed_inputs(list(node.attrs.values())))
    taken = [*range(direct), *listed_inputs(list(attrs.values()))]
    numbers = {old: new for new, old in enumerate(taken)}
    made = inference.outputs(
        node.op,
        [inputs[old] for old in taken],
        {k: _numbered(v, numbers) for k, v in attrs.items()},
    )
    if not kept or len(made) % len(kept):
        return inference.outputs(node.op, inputs, node.attrs)
    starts = range(0, len(made), len(kept))
    return [made[start + kept.index(place)] for start in starts for place in same]


def _kind(item: Any, inputs: Sequence[IRValue]) -> object:
    """What a result may depend on of one place of a list."""
    if not isinstance(item, Input):
        return repr(item)
    value = inputs[item.index]
    return value.shape, value.dtype, value.strides


def _numbered(value: Any, numbers: Mapping[int, int]) -> Any:
    """An attribute whose inputs are those that are kept."""
    if isinstance(value, list):
        return [_numbered(item, numbers) for item in value]
    return Input(numbers[value.index]) if isinstance(value, Input) else value


def _check_results(graph: IRGraph, node: IRNode, written: FXNode, slot: DeviceKind) -> None:
    made = _results(graph, node)
    if len(made) != len(written.outputs):
        raise GraphError(f"makes {len(made)} tensors, the text says {len(written.outputs)}")
    for place, (value_id, found) in enumerate(zip(node.results, made, strict=True)):
        said = None if value_id is None else _said(graph.values[value_id], slot)
        makes = None if found is None else _made(found, slot)
        if said != makes:
            which = f" as result {place}" if len(made) > 1 else ""
            raise GraphError(
                f"makes {_in_words(makes)}{which}, the text says {_in_words(said)}; build the "
                "file again, or write what the call makes"
            )


def _said(value: IRValue, slot: DeviceKind) -> Kind:
    return value.shape, value.dtype, _strides(value.shape, value.strides, slot)


def _made(tensor: torch.Tensor, slot: DeviceKind) -> Kind:
    shape = tuple(tensor.shape)
    return shape, describe_dtype(tensor.dtype), _strides(shape, tensor.stride(), slot)


def _strides(
    shape: Sequence[int], strides: Sequence[int] | None, slot: DeviceKind
) -> tuple[int, ...] | None:
    """Strides as they are compared: where there is a step to take, and on CPUs.

    How CUDA's kernels lay out what they make is known where a GPU is at hand.
    """
    found = None if slot == "cuda" else strides_or_none(shape, strides)
    if found is None:
        return None
    return tuple(step if size > 1 else 0 for size, step in zip(shape, found, strict=True))


def _in_words(kind: Kind | None) -> str:
    if kind is None:
        return "no tensor"
    shape, dtype, strides = kind
    return tensor_text(dtype, shape) + (f" of strides {list(strides)}" if strides else "")


@cache
def _inference(kind: str) -> Inference:
    """What is known of calls already; the fake tensors are of the kind that the operator needs."""
    return Inference(kind)
