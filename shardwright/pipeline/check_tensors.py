"""Rules of tensors: who makes them, where they are, how constants are stored and replaced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product

from shardwright.errors import PipelineError
from shardwright.ir.tensor_meta import overlaps
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import COMMUNICATION, COMPUTE_KINDS, broken
from shardwright.pipeline.schema import ParamValue, Placements, TensorInfo


def check_tensor_sets(index: Connections) -> None:
    """The tensors are exactly those that the supertasks name."""
    document = index.document
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
        if tensor not in index.producers and tensor not in index.users:
            raise broken(
                "tensor-used", "no supertask has this tensor as input or output", tensor=tensor
            )


def check_kinds(index: Connections) -> None:
    """Each tensor is a constant, a pipeline input or produced; outputs are produced."""
    inputs = index.ends["input"][0]
    for tensor, info in index.document.tensors.items():
        producers = index.producers.get(tensor, [])
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
                task=index.users[tensor][0],
                tensor=tensor,
            )
        if info.init is not None and info.value is not None:
            raise broken("one-kind", "the tensor has both value and init; keep one", tensor=tensor)


def check_outputs(index: Connections) -> None:
    """Pipeline outputs are produced by a device, and each stands once."""
    task = index.ends["output"][0]
    names = index.document.supertasks[task].inputs
    (inputs,) = index.ends["input"]
    for tensor in names:
        maker = index.producers.get(tensor, ["the parameter file"])[0]
        direct = maker == inputs or index.document.tensors[tensor].is_constant
        if direct or names.count(tensor) > 1:
            problem = f"comes straight from {maker!r}; let it" if direct else _TWICE
            raise broken(
                "pipeline-output",
                f"the pipeline output {problem} pass through an identity FX supertask under its "
                "own name",
                task=task,
                tensor=tensor,
            )


_TWICE = "stands twice; let the second"


def check_sizes(index: Connections) -> None:
    """Shapes and strides describe tensors that can exist."""
    for tensor, info in index.document.tensors.items():
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
        if _is_allocated(index, tensor) and overlaps(info.shape, info.strides):
            raise broken(
                "strides",
                f"strides {list(info.strides)} of shape {list(info.shape)} let elements overlap, "
                "and this tensor must be allocated; leave strides out to have it contiguous",
                tensor=tensor,
            )


def _is_allocated(index: Connections, tensor: str) -> bool:
    """Whether a runner makes memory for the tensor itself: all that no computation makes."""
    producer = index.producer(tensor)
    return producer is None or index.document.supertasks[producer].kind in COMMUNICATION


def check_constants(index: Connections) -> None:
    """Placements of constants fit their shapes; a parameter file has one format."""
    formats: dict[str, str] = {}
    for tensor, info in index.document.tensors.items():
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


def check_states(index: Connections) -> None:
    """What a state is part of has a name, and the part is inside it."""
    for tensor, info in index.document.tensors.items():
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


def check_locality(index: Connections) -> None:
    """Each supertask finds its inputs on its own device."""
    document = index.document
    for name in index.on_devices():
        task = document.supertasks[name]
        for tensor in task.inputs:
            device = index.devices[tensor]
            if device != task.device:
                stored = document.tensors[tensor].value is not None
                raise broken(
                    "one-device",
                    f"the supertask runs on {task.device!r}, the tensor is on {device!r}; "
                    f"{_OWN_CONSTANT if stored else 'put communication between them'}",
                    task=name,
                    tensor=tensor,
                )


_OWN_CONSTANT = "give each device a constant of its own, with the same path and name"


# --- parts of stored tensors ----------------------------------------------------------------------
#
# A part may be there several times, on several devices: a copy. Distinct parts tile the stored
# tensor once or, where several operators cut it in their own ways, evenly often: each element is in
# as many of them as any other. Where the file says the whole's shape, they make up all of it; a
# program that uses some of a stored tensor leaves the shape out.


def check_parts(index: Connections) -> None:
    """Each stored tensor's parts go together, and have one shape of the whole."""
    for (path, name), values in stored_wholes(index.document.tensors).items():
        shapes = {value.shape for value in values.values()}
        parts = [*{value.placements: None for value in values.values()}]
        (shape,) = shapes if len(shapes) == 1 else (None,)
        if len(shapes) > 1 or not are_parts(parts, shape):
            whole = "all of it" if shape is None else f"the whole of shape {list(shape)}"
            found = "; ".join(map(format_ranges, parts[:8])) + ("; …" if len(parts) > 8 else "")
            raise broken(
                "constant-parts",
                f"the parts {found} of {name!r} in {path!r} do not make up {whole}: each element "
                "must be in as many of them as any other, and the shape the same in all; a file "
                "that uses some of a stored tensor leaves value.shape out",
                tensor=next(reversed(values)),
            )


def stored_wholes(
    tensors: Mapping[str, TensorInfo],
) -> dict[tuple[str, str], dict[str, ParamValue]]:
    """The values of constants by tensor name, for each path and name of what is stored."""
    found: dict[tuple[str, str], dict[str, ParamValue]] = {}
    for tensor, info in tensors.items():
        if info.value is not None:
            key = (info.value.path, info.value.name)
            found.setdefault(key, {})[tensor] = info.value
    return found


def are_parts(parts: Sequence[Placements], shape: Sequence[int] | None) -> bool:
    """Whether each element is in equally many of distinct parts; with a ``shape``, all elements."""
    if len({len(part) for part in parts}) != 1:
        return False
    box = None if shape is None else tuple((0, size) for size in shape)
    if len(parts) == 1:
        return box in (None, parts[0])
    cuts = [sorted({end for part in parts for end in part[dim]}) for dim in range(len(parts[0]))]
    if math.prod(map(len, cuts)) > _MOST_CELLS:
        return False
    counts = Counter(cell for part in parts for cell in _cells(part, cuts))
    whole = box is None or counts.keys() == {*_cells(box, cuts)}
    inside = box is None or all(
        not row or (row[0], row[-1]) == ends for row, ends in zip(cuts, box, strict=True)
    )
    return whole and inside and len({*counts.values()}) <= 1


_MOST_CELLS = 1 << 20
"""A thousand parts along each of two dimensions; a file may ask for no more work than that."""


def _cells(part: Placements, cuts: Sequence[list[int]]) -> Iterator[tuple[int, ...]]:
    """The cells of the grid of ``cuts`` that a part is made of, by where they begin."""
    return product(
        *(
            [cut for cut in row if start <= cut < end]
            for (start, end), row in zip(part, cuts, strict=True)
        )
    )


# --- replaced constants -------------------------------------------------------------------------
#
# A tensor that nothing reads, that is given out nowhere and replaces nothing is an update that was
# forgotten; so is one of several parts of a state of which the others are replaced.


def check_replaces(index: Connections) -> None:
    """``training.replaces`` maps produced tensors to constants that they can become."""
    training, replaced = index.document.training, dict[str, str]()
    for new, old in (training.replaces if training else {}).items():
        for tensor in (new, old):
            if tensor not in index.document.tensors:
                raise broken(
                    "tensor-known",
                    "training.replaces names a tensor that is not a key of tensors",
                    tensor=tensor,
                )
        if old in replaced:
            raise cannot_replace(new, old, f"so does {replaced[old]!r}")
        replaced[old] = new
        _check_replacement(index, new, old)


def _check_replacement(index: Connections, new: str, old: str) -> None:
    before, after = index.document.tensors[old], index.document.tensors[new]
    if old in index.producers:
        raise cannot_replace(new, old, f"{old!r} is no constant")
    if index.producer(new) is None:
        raise cannot_replace(new, old, "no supertask of a device produces it")
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        found, expected = (f"{info.dtype}{list(info.shape)}" for info in (after, before))
        raise cannot_replace(new, old, f"{found} is not {expected}")
    if index.devices[new] != index.devices[old]:
        raise cannot_replace(
            new, old, f"one is on {index.devices[new]!r}, the other on {index.devices[old]!r}"
        )


def cannot_replace(new: str, old: str, why: str) -> PipelineError:
    """The error for a constant that a tensor cannot become."""
    return broken("replaces", f"the tensor replaces constant {old!r}, but {why}", tensor=new)


def check_landing(index: Connections) -> None:
    """Each update lands, on every device that holds a part of the state."""
    training = index.document.training
    if training is None:
        return
    for made, each in _made_together(index):
        lost = [t for t in made if t not in index.users and t not in training.replaces]
        if lost and (each or len(lost) == len(made)):
            raise broken(
                "lands",
                "nothing reads the tensor, and it replaces no constant; name the constant that it "
                "becomes in training.replaces, or leave it out of what is made",
                task=index.producers[lost[0]][0],
                tensor=lost[0],
            )
    _check_all_replaced(index.document.tensors, {*training.replaces.values()})


def _made_together(index: Connections) -> Iterator[tuple[Sequence[str], bool]]:
    """What a graph makes, each for something, and what a group makes, of which something is."""
    tasks = index.document.supertasks
    for task in tasks.values():
        if task.kind in COMPUTE_KINDS:
            yield task.outputs, True
    for members in index.groups.values():
        yield [made for name in members for made in tasks[name].outputs], False


def _check_all_replaced(tensors: Mapping[str, TensorInfo], replaced: set[str]) -> None:
    """Of a state that has a name, all parts and copies are replaced or none."""
    parts: dict[tuple[str, str], list[str]] = {}
    for tensor, info in tensors.items():
        if info.value is not None:
            parts.setdefault((info.value.path, info.value.name), []).append(tensor)
        elif info.origin is not None:
            parts.setdefault(("", info.origin.name), []).append(tensor)
    for names in parts.values():
        kept = [tensor for tensor in names if tensor not in replaced]
        if kept and len(kept) < len(names):
            other = next(tensor for tensor in names if tensor in replaced)
            raise broken(
                "lands",
                f"the constant is not replaced, but {other!r}, which is of the same state, is; a "
                "state changes on every device that holds a part of it",
                tensor=kept[0],
            )
