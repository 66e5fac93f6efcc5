"""Rules of tensors: who makes them, where they are, and how constants are stored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from shardwright.ir.values import overlaps
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import COMMUNICATION, broken
from shardwright.pipeline.schema import Document, Placements, TensorInfo


def check_tensor_sets(document: Document, connections: Connections) -> None:
    """The tensors are exactly those that the supertasks name."""
    for name, task in document.supertasks.items():
        for tensor in chain(task.inputs, task.outputs):
            if tensor not in document.tensors:
                raise broken(
                    "tensor-known",
                    "the supertask names a tensor that is not a key of tensors; add it there",
                    task=name,
                    tensor=tensor,
                )
    for tensor in document.tensors:
        if tensor not in connections.producers and tensor not in connections.users:
            raise broken(
                "tensor-used", "no supertask has this tensor as input or output", tensor=tensor
            )


def check_kinds(document: Document, connections: Connections) -> None:
    """Each tensor is a constant, a pipeline input or produced; outputs are produced."""
    inputs = connections.ends["input"][0]
    for tensor, info in document.tensors.items():
        producers = connections.producers.get(tensor, [])
        if len(producers) > 1:
            raise broken(
                "one-producer",
                f"the tensor is an output of {producers[0]!r} and of {producers[1]!r}; give each "
                "its own tensor",
                task=producers[1],
                tensor=tensor,
            )
        if info.is_constant and producers:
            what = "a pipeline input" if producers[0] == inputs else "an output of this supertask"
            raise broken(
                "one-kind",
                f"the tensor is a constant (it has value or init) and {what}; it can be only one",
                task=producers[0],
                tensor=tensor,
            )
        if not producers and not info.is_constant:
            raise broken(
                "one-kind",
                "the tensor is used but nothing produces it, and it has no value; add its "
                "producer, or the value of a constant",
                task=connections.users[tensor][0],
                tensor=tensor,
            )
        if info.init is not None and info.value is not None:
            raise broken("one-kind", "the tensor has both value and init; keep one", tensor=tensor)


def check_outputs(document: Document, connections: Connections) -> None:
    """Pipeline outputs are produced by a device, and each stands once."""
    task = connections.ends["output"][0]
    names = document.supertasks[task].inputs
    (inputs,) = connections.ends["input"]
    for tensor in names:
        maker = connections.producers.get(tensor, ["the parameter file"])[0]
        if maker == inputs or document.tensors[tensor].is_constant:
            raise broken(
                "pipeline-output",
                f"the pipeline output comes straight from {maker!r}; let it pass through an "
                "identity FX supertask under its own name",
                task=task,
                tensor=tensor,
            )
        if names.count(tensor) > 1:
            raise broken(
                "pipeline-output",
                "the pipeline output stands twice; let the second pass through an identity FX "
                "supertask under its own name",
                task=task,
                tensor=tensor,
            )


def check_sizes(document: Document, connections: Connections) -> None:
    """Shapes and strides describe tensors that can exist."""
    for tensor, info in document.tensors.items():
        if info.nbytes >= 2**63:
            raise broken(
                "tensor-size", f"the shape {list(info.shape)} is beyond any memory", tensor=tensor
            )
        if info.strides is None:
            continue
        if len(info.strides) != len(info.shape):
            raise broken(
                "strides",
                f"{len(info.strides)} strides for {len(info.shape)} dimensions",
                tensor=tensor,
            )
        if _is_allocated(document, connections, tensor) and overlaps(info.shape, info.strides):
            raise broken(
                "strides",
                f"strides {list(info.strides)} of shape {list(info.shape)} let elements overlap, "
                "and this tensor must be allocated; leave strides out to have it contiguous",
                tensor=tensor,
            )


def _is_allocated(document: Document, connections: Connections, tensor: str) -> bool:
    """Whether a runner makes memory for the tensor itself: all that no computation makes."""
    producers = connections.producers.get(tensor)
    if not producers:
        return True
    return document.supertasks[producers[0]].kind in (*COMMUNICATION, "input")


def check_constants(document: Document, _: Connections) -> None:
    """Placements of constants fit their shapes; a parameter file has one format."""
    formats: dict[str, str] = {}
    for tensor, info in document.tensors.items():
        if info.value is None:
            continue
        check_extents(info.value.placements, info, tensor)
        if info.value.shape is not None:
            check_inside(info.value.placements, info.value.shape, info.value.name, tensor)
        path, found = info.value.path, info.value.format
        if not path or "\0" in path or len(path.encode()) > _PATH or _longest(path) > _NAME:
            shown = repr(path if len(path) <= 80 else f"{path[:76]} ...")
            raise broken("weight-file", f"{shown} is no path of a parameter file", tensor=tensor)
        if formats.setdefault(path, found) != found:
            raise broken(
                "weight-file",
                f"the parameter file {path!r} is {found} here and {formats[path]} elsewhere",
                tensor=tensor,
            )


_PATH, _NAME = 4095, 255
"""Bytes of a path, and of a name in it, that Linux takes."""


def _longest(path: str) -> int:
    """Bytes of the longest name in a path."""
    return max(len(name.encode()) for name in path.split("/"))


def check_states(document: Document, _: Connections) -> None:
    """What a state is part of has a name, and the part is inside it."""
    for tensor, info in document.tensors.items():
        if info.origin is None:
            continue
        if info.init is None or not info.origin.name:
            found = "without init" if info.init is None else "with an empty name"
            raise broken(
                "state-origin",
                f"the tensor has an origin {found}; a constant with stored contents is named by "
                "its value, state that begins with zeros by its origin",
                tensor=tensor,
            )
        check_extents(info.origin.placements, info, tensor)
        check_inside(info.origin.placements, info.origin.shape, info.origin.name, tensor)


def check_extents(placements: Placements, info: TensorInfo, tensor: str) -> None:
    """Placements are ranges, one a dimension, as long as the tensor's sizes."""
    if len(placements) != len(info.shape):
        raise broken(
            "placements",
            f"{len(placements)} ranges for {len(info.shape)} dimensions; there must be one a "
            "dimension",
            tensor=tensor,
        )
    for dim, ((start, end), size) in enumerate(zip(placements, info.shape, strict=True)):
        if end - start != size:
            raise broken(
                "placements",
                f"dimension {dim} takes [{start}, {end}), but the tensor's size there is {size}",
                tensor=tensor,
            )


def check_inside(placements: Placements, whole: Sequence[int], origin: str, tensor: str) -> None:
    """Placements are a part of the original, which is of shape ``whole``."""
    if len(placements) != len(whole) or any(
        end > size for (_, end), size in zip(placements, whole, strict=True)
    ):
        raise broken(
            "placements",
            f"the ranges {format_ranges(placements)} are not inside {origin!r} of shape "
            f"{list(whole)}",
            tensor=tensor,
        )


def format_ranges(placements: Placements) -> str:
    """Placements as a message shows them: ``[0, 4), [2, 3)``."""
    return ", ".join(f"[{start}, {end})" for start, end in placements) or "()"


def check_locality(document: Document, connections: Connections) -> None:
    """Each supertask finds its inputs on its own device."""
    for name, task in document.supertasks.items():
        if task.device is None:
            continue
        for tensor in task.inputs:
            place = connections.devices[tensor]
            if place != task.device:
                raise broken(
                    "one-device",
                    f"the supertask runs on {task.device!r}, the tensor is on {place!r}; "
                    f"{_moving(document.tensors[tensor])}",
                    task=name,
                    tensor=tensor,
                )


def _moving(info: TensorInfo) -> str:
    if info.value is not None:
        return "give each device a constant of its own, with the same path and name"
    return "put communication between them"
