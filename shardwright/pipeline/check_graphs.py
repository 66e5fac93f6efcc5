"""Rules of computation: graphs make what they say, of and for the tensors of their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from shardwright.errors import GraphError, PipelineError
from shardwright.ir.operators import is_built_in, resolve
from shardwright.ir.tensor_meta import strides_or_none
from shardwright.ops.catalog import REFUSED, is_allowed
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.fxtext import MadeTensor
from shardwright.pipeline.graphs import TaskText, read_text
from shardwright.pipeline.rules import COMPUTE_KINDS, ONE_KIND, broken
from shardwright.pipeline.schema import Document, SuperTask, TensorInfo


def check_blobs(index: Connections) -> None:
    """Blobs are there and used."""
    document = index.document
    blobs = document.blobs or {}
    used = set()
    for name, task in document.supertasks.items():
        if task.data_blob is None:
            continue
        used.add(task.data_blob)
        if task.data_blob not in blobs:
            raise broken("blobs", f"there is no blob {task.data_blob!r}", task=name)
    if unused := sorted(blobs.keys() - used):
        raise broken("blobs", f"no supertask uses blob {unused[0]!r}; remove it")


def check_graphs(index: Connections) -> None:
    """Graphs compute what they say, and their inputs and outputs are their tasks'."""
    document = index.document
    texts: dict[tuple[str, str], TaskText] = {}
    tensors = dict(document.tensors)
    for name, task in document.supertasks.items():
        if task.kind not in COMPUTE_KINDS:
            continue
        key = (task.kind, document.data_of(name))
        if key not in texts:
            texts[key] = _read(name, *key)
            _check_required(document, name, texts[key])
            _check_allowed(name, texts[key])
        text = texts[key]
        _check_counts(name, task, text)
        _prove(document, name, task, text, tensors)
        _check_kind(document, name, task, text)
        _check_taken(document, name, task, text)
        _check_results(document, name, task, text)
        _lay(tensors, task, text)
    _check_placeholders(index, texts)
    _check_unused_requires(document, texts.values())


def _read(name: str, kind: str, data: str) -> TaskText:
    try:
        return read_text(kind, data)
    except GraphError as error:
        raise broken("graph", str(error), task=name) from None
    except PipelineError as error:
        raise broken(error.rule or "graph", error.reason, task=name) from None


def _check_required(document: Document, name: str, text: TaskText) -> None:
    """Operators that torch does not bring are listed."""
    if missing := sorted(_foreign(text).difference(document.requires or ())):
        raise broken(
            "requires",
            f"the graph calls {missing[0]!r}, which torch does not bring; list it in requires",
            task=name,
        )


def _check_allowed(name: str, text: TaskText) -> None:
    """Operators are such as a file may call."""
    for op, node in text.operators.items():
        if not is_allowed(op):
            raise broken("operators", f"{node!r} {REFUSED.format(op)}", task=name, node=node)


def _prove(
    document: Document,
    name: str,
    task: SuperTask,
    text: TaskText,
    tensors: Mapping[str, TensorInfo],
) -> None:
    """Prove the graph, unless it calls operators that are not loaded here; who runs it does."""
    if not all(map(_is_loaded, _foreign(text))):
        return
    try:
        text.prove(
            [tensors[tensor] for tensor in task.inputs],
            document.devices[task.device or ""].kind,
        )
    except GraphError as error:
        rule = "graph" if error.node is None else "graph-calls"
        raise broken(rule, str(error), task=name, node=error.node) from None


def _lay(tensors: dict[str, TensorInfo], task: SuperTask, text: TaskText) -> None:
    """Let who reads what a task makes find it as it lies, which a tensor's entry may leave out."""
    for tensor, result in zip(task.outputs, text.results, strict=True):
        made = tensors[task.inputs[result]] if isinstance(result, int) else result
        if made.strides != tensors[tensor].strides:
            tensors[tensor] = msgspec.structs.replace(tensors[tensor], strides=made.strides)


def _foreign(text: TaskText) -> set[str]:
    """The operators of a text that neither torch nor shardwright brings."""
    return {op for op in text.operators if not is_built_in(op)}


def _is_loaded(op: str) -> bool:
    try:
        resolve(op)
    except GraphError:
        return False
    return True


def _check_unused_requires(document: Document, texts: Iterable[TaskText]) -> None:
    called = {op for text in texts for op in _foreign(text)}
    if unused := sorted(set(document.requires or ()) - called):
        raise broken("requires", f"no graph calls the operator {unused[0]!r}; remove it")


# --- a graph and its task --------------------------------------------------------------------


def _check_counts(name: str, task: SuperTask, text: TaskText) -> None:
    for side, found, expected in (
        ("takes", len(task.inputs), len(text.inputs)),
        ("gives", len(task.outputs), len(text.results)),
    ):
        if found != expected:
            raise broken(
                "graph-tensors",
                f"the graph {side} {expected} tensors, the supertask names {found}",
                task=name,
            )


def _check_kind(document: Document, name: str, task: SuperTask, text: TaskText) -> None:
    """The task's device is of the kind that its operators are for."""
    kind = document.devices[task.device or ""].kind
    for op in sorted(text.operators.keys() & ONE_KIND.keys()):
        if ONE_KIND[op] != kind:
            raise broken(
                "device-kind",
                f"the graph calls {op!r}, which only {ONE_KIND[op]} has, on device "
                f"{task.device!r} of kind {kind}; build the pipeline again with "
                f"device_kind={kind!r}",
                task=name,
            )


def _check_taken(document: Document, name: str, task: SuperTask, text: TaskText) -> None:
    """What the graph says that it takes is what the tensors are."""
    if text.takes is None:
        return
    for tensor, taken in zip(task.inputs, text.takes, strict=True):
        info = document.tensors[tensor]
        if (info.shape, info.dtype, _strides(info)) != (taken.shape, taken.dtype, _strides(taken)):
            raise broken(
                "graph-tensors",
                f"the graph takes {taken.dtype}{list(taken.shape)} of strides {_strides(taken)}, "
                f"the tensor is {info.dtype}{list(info.shape)} of strides {_strides(info)} (None: "
                "contiguous)",
                task=name,
                tensor=tensor,
            )


def _check_results(document: Document, name: str, task: SuperTask, text: TaskText) -> None:
    """What the graph says that it makes is what the tensors are."""
    for tensor, result in zip(task.outputs, text.results, strict=True):
        info = document.tensors[tensor]
        made = document.tensors[task.inputs[result]] if isinstance(result, int) else result
        if (made.shape, made.dtype) != (info.shape, info.dtype):
            raise broken(
                "graph-tensors",
                f"the graph makes {made.dtype}{list(made.shape)}, the tensor is "
                f"{info.dtype}{list(info.shape)}",
                task=name,
                tensor=tensor,
            )
        if info.strides is not None and _strides(info) != _strides(made):
            raise broken(
                "graph-tensors",
                f"the graph makes a tensor of strides {_strides(made)}, the tensor's are "
                f"{_strides(info)} (None: contiguous)",
                task=name,
                tensor=tensor,
            )


def _strides(spec: TensorInfo | MadeTensor) -> tuple[int, ...] | None:
    return strides_or_none(spec.shape, spec.strides)


def _check_placeholders(index: Connections, texts: Mapping[tuple[str, str], TaskText]) -> None:
    """Constants say which placeholder they fill, in a graph that takes them."""
    for tensor, info in index.document.tensors.items():
        if info.value is None:
            continue
        users = index.users.get(tensor, ())
        found = [
            (task, placeholder)
            for task in users
            for placeholder in _placeholders(index.document, task, tensor, texts)
        ]
        if found and info.value.name_in_graph not in {placeholder for _, placeholder in found}:
            task, placeholder = found[0]
            raise broken(
                "name-in-graph",
                f"name_in_graph is {info.value.name_in_graph!r}, the placeholder {placeholder!r}",
                task=task,
                tensor=tensor,
            )


def _placeholders(
    document: Document, name: str, tensor: str, texts: Mapping[tuple[str, str], TaskText]
) -> list[str]:
    """What a task's graph calls a tensor that it takes."""
    task = document.supertasks[name]
    if task.kind not in COMPUTE_KINDS:
        return []
    text = texts[task.kind, document.data_of(name)]
    return [place for taken, place in zip(task.inputs, text.inputs, strict=True) if taken == tensor]
