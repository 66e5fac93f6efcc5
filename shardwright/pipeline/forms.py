"""Forms of a document: the one in which rules know it, and the plain one that can be written.

The specification says of a file what it holds, not in which order or how sparingly. What is read is
normalized, so that nothing behind it has two cases: one input and one output task, a group for each
communication, outputs that tasks of their own make, nothing unused, and an order in which each
device can work its tasks off. A file that has this form is left as it is.

The plain form has the specification's own keys, and no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import TypeVar

from msgspec.structs import fields, replace

from shardwright.errors import PipelineError
from shardwright.ir import Builder
from shardwright.pipeline.check import check
from shardwright.pipeline.check_structure import stuck_in_file_order
from shardwright.pipeline.connections import connect
from shardwright.pipeline.fxtext import encode
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import Document, SuperTask, TensorInfo


def normalize(document: Document) -> None:
    """Bring a document that was just read into the one form, in its place."""
    _join_ends(document)
    _name_groups(document)
    _hand_outputs_on(document)
    _drop_unused(document)
    _sort(document)


def _join_ends(document: Document) -> None:
    """One input task and one output task, with the tensors of all."""
    for kind in ("input", "output"):
        names = [name for name, task in document.supertasks.items() if task.kind == kind]
        if len(names) > 1:
            tasks = [document.supertasks[name] for name in names]
            first = tasks[0]
            first.inputs = tuple(chain.from_iterable(task.inputs for task in tasks))
            first.outputs = tuple(chain.from_iterable(task.outputs for task in tasks))
            for name in names[1:]:
                del document.supertasks[name]


def _name_groups(document: Document) -> None:
    """A name of its own for each communication: the k-th of a name on each of its devices."""
    times = Counter((t.group, t.device_idx) for t in document.supertasks.values() if t.group)
    shared = {group for (group, _), count in times.items() if count > 1}
    taken = {task.group for task in document.supertasks.values()}
    seen: Counter[tuple[str, int | None]] = Counter()
    for task in document.supertasks.values():
        if task.group is None or task.group not in shared:
            continue
        key = (task.group, task.device_idx)
        seen[key] += 1
        if seen[key] > 1:
            name = f"{task.group}__{seen[key]}"
            while name in taken:
                name += "_"
            task.group = name


def _hand_outputs_on(document: Document) -> None:
    """An output that is an input, a constant or given out twice goes through an identity task."""
    tasks = document.supertasks
    sinks = [task for task in tasks.values() if task.kind == "output"]
    given = {t for task in tasks.values() if task.kind == "input" for t in task.outputs}
    if len(sinks) != 1 or document.training is not None:
        return
    (sink,), slices = sinks, document.metadata.tensor_slices.outputs
    outputs: list[str] = []
    for name in sink.inputs:
        info, piece = document.tensors.get(name), slices.get(name)
        if info is None or piece is None or not (name in given or info.is_constant):
            outputs.append(name)
            continue
        new, task = _free(document.tensors, name), SuperTask("FX", (name,), (), piece.device)
        builder = Builder("identity")
        task.data = encode(builder.finish([builder.input("x", info.shape, info.dtype)]))
        task.outputs = (new,)
        document.tensors[new] = TensorInfo(info.shape, info.dtype, strides=info.strides)
        slices[new] = slices.pop(name)
        if info.value is not None and not any(name in t.inputs for t in _devices_tasks(document)):
            info.value = replace(info.value, name_in_graph="i0")
        tasks[_free(tasks, f"identity.{new}")] = task
        outputs.append(new)
    sink.inputs = tuple(outputs)


def _devices_tasks(document: Document) -> Iterator[SuperTask]:
    return (task for task in document.supertasks.values() if task.device is not None)


def _free(taken: Collection[str], name: str) -> str:
    """``name__k`` with the smallest free k."""
    k = 1
    while f"{name}__{k}" in taken:
        k += 1
    return f"{name}__{k}"


def _drop_unused(document: Document) -> None:
    """Without tensors and devices that nothing names."""
    tasks, slices = document.supertasks.values(), document.metadata.tensor_slices
    training = document.training
    named = {tensor for task in tasks for tensor in (*task.inputs, *task.outputs)}
    named.update(slices.inputs, slices.outputs)
    devices = {task.device for task in tasks}
    devices.update(
        piece.device for side in (slices.inputs, slices.outputs) for piece in side.values()
    )
    if training is not None:
        named.update(training.replaces, training.replaces.values())
        ranks = training.schedule.slots if training.schedule else ()
        devices.update(chain.from_iterable(ranks))
    document.tensors = {name: info for name, info in document.tensors.items() if name in named}
    document.devices = {name: info for name, info in document.devices.items() if name in devices}


# --- order -------------------------------------------------------------------------------------


def _sort(document: Document) -> None:
    """Tasks behind those that make what they read; the file's own order where that is one.

    A communication stands where all of its members can take part, so that communications stand in
    one order on all devices. What can never be done stays at the end, for the rules to name.
    """
    tasks = document.supertasks
    producers = {tensor: name for name, task in tasks.items() for tensor in task.outputs}
    units = {name: f"group {task.group}" if task.group else name for name, task in tasks.items()}
    members: dict[str, list[str]] = {}
    waits: dict[str, set[str]] = {}
    for name, unit in units.items():
        members.setdefault(unit, []).append(name)
        before = {units[producers[t]] for t in tasks[name].inputs if t in producers}
        waits.setdefault(unit, set()).update(before)
    if not _has_places(document, members) or _is_in_order(document, producers):
        return
    order: list[str] = []
    numbers = {unit: number for number, unit in enumerate(members)}
    readers: dict[str, list[str]] = {}
    for unit, before in waits.items():
        for other in before:
            readers.setdefault(other, []).append(unit)
    missing = {unit: len(before) for unit, before in waits.items()}
    ready = [(number, unit) for unit, number in numbers.items() if not missing[unit]]
    while ready:
        _, unit = heappop(ready)
        order += members[unit]
        for reader in readers.get(unit, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, (numbers[reader], reader))
    left = tasks.keys() - order
    document.supertasks = {
        name: tasks[name] for name in (*order, *filter(left.__contains__, tasks))
    }


def _has_places(document: Document, members: dict[str, list[str]]) -> bool:
    """Whether the members of each group are on devices of their own."""
    for names in members.values():
        if document.supertasks[names[0]].group is not None:
            places = {document.supertasks[name].device for name in names}
            if len(places & document.devices.keys()) < len(names):
                return False
    return True


def _is_in_order(document: Document, producers: dict[str, str]) -> bool:
    return _is_sorted(document, producers) and not stuck_in_file_order(connect(document))


def _is_sorted(document: Document, producers: dict[str, str]) -> bool:
    seen: set[str] = set()
    for name, task in document.supertasks.items():
        if any(t in producers and producers[t] not in seen for t in task.inputs):
            return False
        seen.add(name)
    return True


# --- the plain form ------------------------------------------------------------------------------


D = TypeVar("D", bound=Document)

DTYPES = frozenset({"f64", "f32", "f16", "bf16", "f8", "bool", "i64", "i32", "i16", "i8"})
"""The specification's dtypes; all others of `schema.DType` extend it."""

SPECIFIED_DEVICE_KINDS = frozenset({"cpu", "npu"})
"""The specification's kinds of devices."""

SPECIFIED_TASK_FIELDS = frozenset(
    {"kind", "inputs", "outputs", "device", "data", "group", "device_idx", "metadata"}
)
"""The specification's fields of a supertask."""


def to_plain(document: D) -> D:
    """The document in the plain format, checked. Raises PipelineError where it cannot say it all.

    Inputs and outputs of a plain file are tensors: how they fold into lists, dicts and objects is
    an optional key, so it is called with tensors, by position or name, and gives one, or a dict.
    """
    if needed := list(dict.fromkeys(_extensions(document))):
        raise _not_plain("; ".join(needed))
    found = replace(
        document,
        devices={name: replace(device, host=None) for name, device in document.devices.items()},
        tensors={name: _plain_tensor(info) for name, info in document.tensors.items()},
        supertasks={name: _plain_task(document, name) for name in document.supertasks},
        metadata=replace(document.metadata, structure=None, rows=()),
        version=None,
        blobs=None,
    )
    try:
        check(found)
    except PipelineError as error:
        raise _not_plain(_strides(document, error)) from error
    return found


def _extensions(document: Document) -> Iterator[str]:
    """What the document says that the specification has no key or word for."""
    if document.training is not None:
        what = "a training step" if document.training.microbatches else "buffers that are written"
        yield f"training ({what})"
    if document.requires:
        yield f"requires (the operator {document.requires[0]!r})"
    hosts = {device.host for device in document.devices.values()}
    if len(hosts) > 1:
        yield f"host (devices of {len(hosts)} hosts)"
    for name, device in document.devices.items():
        if device.kind not in SPECIFIED_DEVICE_KINDS:
            yield f"the device kind {device.kind!r} (of {name!r})"
            break
    fused = (name for name, device in document.devices.items() if device.pes is not None)
    for name in fused:
        yield f"pes (of device {name!r})"
        break
    yield from _extensions_of_tensors(document)


def _extensions_of_tensors(document: Document) -> Iterator[str]:
    metadata = document.metadata
    for maps in (
        document.tensors,
        metadata.tensors.inputs,
        metadata.tensors.outputs,
        metadata.tensor_slices.inputs,
        metadata.tensor_slices.outputs,
    ):
        for name, info in maps.items():
            if info.dtype not in DTYPES:
                yield f"the dtype {info.dtype!r} (of {name!r})"
                return
    for name, info in document.tensors.items():
        if info.init is not None:
            yield f"init (of {name!r})"
            return


def _plain_tensor(info: TensorInfo) -> TensorInfo:
    value = info.value and replace(info.value, shape=None)
    return replace(info, value=value, strides=None)


def _plain_task(document: Document, name: str) -> SuperTask:
    task = document.supertasks[name]
    data = task.data if task.data_blob is None else document.data_of(name)
    extensions = {field.name for field in fields(task)} - SPECIFIED_TASK_FIELDS
    return replace(task, data=data, **dict.fromkeys(extensions))


def _strides(document: Document, error: PipelineError) -> str:
    """Which strides the graph needs that could not be proved without them."""
    task = document.supertasks.get(error.task or "")
    names = (error.tensor, *task.inputs, *task.outputs) if task else (error.tensor,)
    lying = [name for name in names if name and document.tensors[name].strides is not None]
    place = f"of {lying[0]!r}" if lying else f"of what {error.task!r} reads"
    return f"strides ({place}, which is not contiguous: {error})"


def _not_plain(extensions: str) -> PipelineError:
    return broken(
        "plain",
        f"the pipeline needs extensions of the format to mean the same: {extensions}; save it "
        "without plain",
    )
