"""Rules of tensors: who makes them, where they are, how constants are stored and replaced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise, product

from shardwright.communication import COMMUNICATION
from shardwright.errors import PipelineError
from shardwright.ir.tensor_meta import overlaps
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import COMPUTE_KINDS, Finding, broken
from shardwright.pipeline.schema import ParamValue, Placements, SuperTask, TensorInfo


def check_known(index: Connections, name: str, task: SuperTask) -> Finding:
    """The tensors that a supertask names are there."""
    for tensor in chain(task.inputs, task.outputs):
        if tensor not in index.document.tensors:
            message = "the supertask names a tensor that is not a key of tensors; add it there"
            return broken("tensor-known", message, task=name, tensor=tensor)
    return None


def check_used(index: Connections, tensor: str, info: TensorInfo) -> Finding:
    """Some supertask names the tensor."""
    if tensor in index.producers or tensor in index.users:
        return None
    return "no supertask has this tensor as input or output"


def check_producers(index: Connections, tensor: str, info: TensorInfo) -> Finding:
    """The tensor is produced once."""
    if len(producers := index.producers.get(tensor, [])) < 2:
        return None
    message = f"the tensor is an output of {producers[0]!r} and of {producers[1]!r}; give each its "
    return broken("one-producer", f"{message}own tensor", task=producers[1], tensor=tensor)


def check_kind(index: Connections, tensor: str, info: TensorInfo) -> Finding:
    """The tensor is a constant, a pipeline input or produced."""
    (producer,) = index.producers.get(tensor, [None])
    if producer is not None and info.is_constant:
        is_input = producer in index.ends["input"]
        message = (
            "the tensor is a constant (it has value or init) and "
            f"{'a pipeline input' if is_input else 'an output of this supertask'}; it can be only "
            "one"
        )
        return broken("one-kind", message, task=producer, tensor=tensor)
    if producer is None and not info.is_constant:
        message = (
            "the tensor is used but nothing produces it, and it has no value; add its producer, or "
            "the value of a constant"
        )
        return broken("one-kind", message, task=index.users[tensor][0], tensor=tensor)
    if info.init is not None and info.value is not None:
        return "the tensor has both value and init; keep one"
    return None


def check_outputs(index: Connections) -> Finding:
    """Pipeline outputs are produced by a device, and each stands once."""
    (task,), (inputs,) = index.ends["output"], index.ends["input"]
    names = index.document.supertasks[task].inputs
    for tensor in names:
        maker = index.producers.get(tensor, ["the parameter file"])[0]
        direct = maker == inputs or index.document.tensors[tensor].is_constant
        if direct or names.count(tensor) > 1:
            problem = f"comes straight from {maker!r}; let it" if direct else _TWICE
            message = f"the pipeline output {problem} pass through an identity FX supertask under "
            return broken("pipeline-output", f"{message}its own name", task=task, tensor=tensor)
    return None


_TWICE = "stands twice; let the second"


def check_size(index: Connections, tensor: str, info: TensorInfo) -> Finding:
    """Shapes are of tensors that can exist."""
    if info.nbytes < 2**63:
        return None
    return f"the shape {list(info.shape)} is beyond any memory"


def check_strides(index: Connections, tensor: str, info: TensorInfo) -> Finding:
    """There is a stride a dimension; no elements overlap, but in what a computation makes."""
    if info.strides is None:
        return None
    if len(info.strides) != len(info.shape):
        return f"{len(info.strides)} strides for {len(info.shape)} dimensions"
    producer = index.producer(tensor)
    is_allocated = producer is None or index.document.supertasks[producer].kind in COMMUNICATION
    if is_allocated and overlaps(info.shape, info.strides):
        return (
            f"strides {list(info.strides)} of shape {list(info.shape)} let elements overlap, and "
            "this tensor must be allocated; leave strides out to have it contiguous"
        )
    return None


def check_weight_files(index: Connections) -> Finding:
    """A parameter file has a path and one format."""
    formats: dict[str, str] = {}
    for tensor, info in index.document.tensors.items():
        if info.value is None:
            continue
        path, found = info.value.path, info.value.format
        longest = max(len(name.encode()) for name in path.split("/"))
        if not path or "\0" in path or len(path.encode()) > _PATH or longest > _NAME:
            shown = repr(path if len(path) <= 80 else f"{path[:76]} ...")
            message = f"{shown} is no path of a parameter file"
            return broken("weight-file", message, tensor=tensor)
        if (other := formats.setdefault(path, found)) != found:
            message = f"the parameter file {path!r} is {found} here and {other} elsewhere"
            return broken("weight-file", message, tensor=tensor)
    return None


_PATH, _NAME = 4095, 255
"""Bytes of a path, and of a name in it, that Linux takes."""


def check_origin(index: Connections, tensor: str, info: TensorInfo) -> Finding:
    """What a state is part of has a name."""
    if info.origin is None or (info.init is not None and info.origin.name):
        return None
    found = "without init" if info.init is None else "with an empty name"
    return (
        f"the tensor has an origin {found}; a constant with stored contents is named by its value, "
        "state that begins with zeros by its origin"
    )


def check_placements(index: Connections, tensor: str, info: TensorInfo) -> Finding:
    """Constants and states are parts of their wholes, as large as the tensor."""
    for part in (info.value, info.origin):
        if part and (found := misplaced(part.placements, info, part.shape, part.name)):
            return found
    return None


def misplaced(
    placements: Placements, info: TensorInfo, whole: Sequence[int] | None, origin: str
) -> str | None:
    """Why ranges are no part of ``origin``, of shape ``whole``, that is as large as the tensor."""
    if tuple([end - start for start, end in placements]) != info.shape:
        return _wrong_extent(placements, info.shape)
    if whole is not None and not is_inside(placements, whole):
        ranges = format_ranges(placements)
        return f"the ranges {ranges} are not inside {origin!r} of shape {list(whole)}"
    return None


def _wrong_extent(placements: Placements, shape: Sequence[int]) -> str:
    """Which range is not as long as the tensor's size."""
    if len(placements) != len(shape):
        return (
            f"{len(placements)} ranges for {len(shape)} dimensions; there must be one a dimension"
        )
    dim = next(k for k, (start, end) in enumerate(placements) if end - start != shape[k])
    start, end = placements[dim]
    return f"dimension {dim} takes [{start}, {end}), but the tensor's size there is {shape[dim]}"


def is_inside(placements: Placements, shape: Sequence[int]) -> bool:
    """Whether ranges are a part of a tensor of ``shape``."""
    return len(placements) == len(shape) and all(
        end <= size for (_, end), size in zip(placements, shape, strict=True)
    )


def format_ranges(placements: Placements) -> str:
    """Placements as a message shows them: ``[0, 4), [2, 3)``."""
    return ", ".join(f"[{start}, {end})" for start, end in placements) or "()"


def check_locality(index: Connections, name: str, task: SuperTask) -> Finding:
    """A supertask finds its inputs on its own device."""
    for tensor in task.inputs if task.device is not None else ():
        if (device := index.devices[tensor]) != task.device:
            stored = index.document.tensors[tensor].value is not None
            remedy = _OWN_CONSTANT if stored else "put communication between them"
            message = f"the supertask runs on {task.device!r}, the tensor is on {device!r}; "
            return broken("one-device", message + remedy, task=name, tensor=tensor)
    return None


_OWN_CONSTANT = "give each device a constant of its own, with the same path and name"


# --- parts of stored tensors ----------------------------------------------------------------------
#
# A part may be there several times, on several devices: a copy. Distinct parts tile the stored
# tensor once or, where several operators cut it in their own ways, evenly often: each element is in
# as many of them as any other. Where the file says the whole's shape, they make up all of it; a
# program that uses some of a stored tensor leaves the shape out.


def check_parts(index: Connections) -> Finding:
    """Each stored tensor's parts go together, and have one shape of the whole."""
    for (path, name), values in stored_wholes(index.document.tensors).items():
        shapes = {value.shape for value in values.values()}
        parts = [*{value.placements: None for value in values.values()}]
        (shape,) = shapes if len(shapes) == 1 else (None,)
        if len(shapes) > 1 or not are_parts(parts, shape):
            whole = "all of it" if shape is None else f"the whole of shape {list(shape)}"
            found = "; ".join(map(format_ranges, parts[:8])) + ("; …" if len(parts) > 8 else "")
            message = (
                f"the parts {found} of {name!r} in {path!r} do not make up {whole}: each element "
                "must be in as many of them as any other, and the shape the same in all; a file "
                "that uses some of a stored tensor leaves value.shape out"
            )
            return broken("constant-parts", message, tensor=next(reversed(values)))
    return None


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
    return _are_parts((*parts,), None if shape is None else (*shape,))


@lru_cache(maxsize=1024)
def _are_parts(parts: tuple[Placements, ...], shape: tuple[int, ...] | None) -> bool:
    """`are_parts`; equal layers are cut in equal parts."""
    if len(parts) == 1:
        return shape is None or parts[0] == tuple((0, size) for size in shape)
    if len({len(part) for part in parts}) != 1:
        return False
    if shape is not None and not all(is_inside(part, shape) for part in parts):
        return False
    counts = count_cells(parts, shape)
    return counts is not None and 0 not in counts.values() and len({*counts.values()}) <= 1


def count_cells(
    parts: Sequence[Placements], shape: Sequence[int] | None
) -> Counter[Placements] | None:
    """In how many parts each cell of their common grid is; with a ``shape``, of all of its cells.

    None where the cells are more than a file may ask for.
    """
    whole = [] if shape is None else [tuple((0, size) for size in shape)]
    boxes = [*whole, *parts]
    cuts = [sorted({*chain.from_iterable(row)}) for row in zip(*boxes, strict=True)]
    if math.prod(map(len, cuts)) > _MOST_CELLS:
        return None
    counts = Counter({cell: 0 for box in whole for cell in _cells(box, cuts)})
    for part in parts:
        counts.update(_cells(part, cuts))
    return counts


_MOST_CELLS = 1 << 20
"""A thousand parts along each of two dimensions; a file may ask for no more work than that."""


def _cells(part: Placements, cuts: Sequence[list[int]]) -> Iterator[Placements]:
    """The cells of the grid of ``cuts`` that a part is made of."""
    return product(
        *(
            [(a, b) for a, b in pairwise(row) if start <= a and b <= end]
            for (start, end), row in zip(part, cuts, strict=True)
        )
    )


# --- replaced constants -------------------------------------------------------------------------
#
# A tensor that nothing reads, that is given out nowhere and replaces nothing is an update that was
# forgotten; so is one of several parts of a state of which the others are replaced.


def check_replaced_known(index: Connections) -> Finding:
    """``training.replaces`` names tensors that are there."""
    for tensor in chain.from_iterable(index.document.replaces.items()):
        if tensor not in index.document.tensors:
            message = "training.replaces names a tensor that is not a key of tensors"
            return broken("tensor-known", message, tensor=tensor)
    return None


def check_replaces(index: Connections) -> Finding:
    """``training.replaces`` maps produced tensors to constants that they can become."""
    replaced: dict[str, str] = {}
    for new, old in index.document.replaces.items():
        if (other := replaced.setdefault(old, new)) != new:
            return cannot_replace(new, old, f"so does {other!r}")
        before, after = index.document.tensors[old], index.document.tensors[new]
        if old in index.producers:
            return cannot_replace(new, old, f"{old!r} is no constant")
        if index.producer(new) is None:
            return cannot_replace(new, old, "no supertask of a device produces it")
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            found, expected = (f"{info.dtype}{list(info.shape)}" for info in (after, before))
            return cannot_replace(new, old, f"{found} is not {expected}")
        if (here := index.devices[new]) != (there := index.devices[old]):
            return cannot_replace(new, old, f"one is on {here!r}, the other on {there!r}")
    return None


def cannot_replace(new: str, old: str, why: str) -> PipelineError:
    """The error for a constant that a tensor cannot become."""
    return broken("replaces", f"the tensor replaces constant {old!r}, but {why}", tensor=new)


def check_made(index: Connections) -> Finding:
    """In a step each tensor of a graph, and one of a group, is read or replaces a constant."""
    if index.document.training is None:
        return None
    for made, each in _made_together(index):
        lost = [t for t in made if t not in index.users and t not in index.document.replaces]
        if lost and (each or len(lost) == len(made)):
            message = (
                "nothing reads the tensor, and it replaces no constant; name the constant that it "
                "becomes in training.replaces, or leave it out of what is made"
            )
            return broken("lands", message, task=index.producers[lost[0]][0], tensor=lost[0])
    return None


def _made_together(index: Connections) -> Iterator[tuple[Sequence[str], bool]]:
    """What a graph makes, each for something, and what a group makes, of which something is."""
    tasks = index.document.supertasks
    for task in tasks.values():
        if task.kind in COMPUTE_KINDS:
            yield task.outputs, True
    for members in index.groups.values():
        yield [made for name in members for made in tasks[name].outputs], False


def check_all_replaced(index: Connections) -> Finding:
    """Of a state that has a name, all parts and copies are replaced or none."""
    replaced = {*index.document.replaces.values()}
    parts: dict[tuple[str, str], list[str]] = {}
    for tensor, info in index.document.tensors.items() if replaced else ():
        if info.value is not None:
            parts.setdefault((info.value.path, info.value.name), []).append(tensor)
        elif info.origin is not None:
            parts.setdefault(("", info.origin.name), []).append(tensor)
    for names in parts.values():
        kept = [tensor for tensor in names if tensor not in replaced]
        if kept and len(kept) < len(names):
            other = next(tensor for tensor in names if tensor in replaced)
            message = (
                f"the constant is not replaced, but {other!r}, which is of the same state, is; a "
                "state changes on every device that holds a part of it"
            )
            return broken("lands", message, tensor=kept[0])
    return None
