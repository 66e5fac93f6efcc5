"""What a pipeline file holds, as tables and a tree for a terminal.

Input: a checked document; output: rich renderables. What repeats (equal layers, slots that work
alike) stands once with a count, so that a deep model on many slots stays readable.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from shardwright.ir.tensor_meta import count_text, format_bytes, tensor_text
from shardwright.pipeline.connections import connect
from shardwright.pipeline.rules import FAMILY_OF
from shardwright.pipeline.schema import Device, Document, SuperTask
from shardwright.pipeline.text import format_slice, training_lines
from shardwright.reporting.tables import (
    communication_groups,
    constants_of,
    new_table,
    operator_count,
    slot_totals,
    total_bytes,
)


def overview(document: Document) -> RenderableType:
    """One line about the whole, the device slots, the communication, and the tree."""
    lines = training_lines(document, connect(document))
    parts: list[RenderableType] = [headline(document), *(Text(line) for line in lines)]
    parts += ["", device_table(document)]
    if communication_groups(document):
        parts += ["", communication_table(document)]
    return Group(*parts, "", supertask_tree(document))


def headline(document: Document) -> Text:
    """Name, counts and the bytes of all constants in one line."""
    constants = constants_of(document, document.supertasks.values())
    stored = format_bytes(total_bytes(document, constants))
    counts = (
        count_text(len(document.devices), "device slot"),
        count_text(len(document.supertasks), "supertask"),
        count_text(len(document.tensors), "tensor"),
        f"{count_text(len(constants), 'constant')} of {stored}",
    )
    return Text.assemble((document.name, "bold"), "  ", ", ".join(counts))


def device_table(document: Document) -> Table:
    """One row a device slot: its device, its work, its weights, what it sends and receives."""
    counts = ("tasks", "operators", "constants")
    sizes = ("weights", "sends", "receives")
    table = new_table("Device slots", ("slot", "device"), (*counts, *sizes))
    for slot, device in document.devices.items():
        totals = slot_totals(document, slot)
        table.add_row(
            escape(slot),
            escape(device_text(device)),
            str(totals.supertasks),
            str(totals.operators),
            str(totals.constants),
            format_bytes(totals.stored_bytes),
            format_bytes(totals.sent_bytes),
            format_bytes(totals.received_bytes),
        )
    return table


def communication_table(document: Document) -> Table:
    """One row a communication: kind, members in order, and what goes over.

    Groups that differ only in which tensors go over (those of equal layers) share a row, which
    names the first of them and has the bytes of all.
    """
    headings = ("group", "kind", "slots", "tensor", "type")
    table = new_table("Communication", headings, ("times", "bytes"))
    alike: dict[tuple[str, ...], list[tuple[str, list[SuperTask]]]] = {}
    for group, tasks in communication_groups(document).items():
        row = (_kind_text(tasks), _members_text(document, tasks), _types_text(document, tasks))
        alike.setdefault(row, []).append((group, tasks))
    for (kind, slots, types), groups in alike.items():
        more = " …" if len(groups) > 1 else ""
        given = [name for _, tasks in groups for task in tasks for name in task.inputs]
        table.add_row(
            escape(groups[0][0] + more),
            kind,
            escape(slots),
            escape(given[0] + more),
            escape(types),
            str(len(groups)),
            format_bytes(total_bytes(document, given)),
        )
    return table


def _kind_text(tasks: Sequence[SuperTask]) -> str:
    """``send/recv``, ``all_reduce``, ``all_reduce max``."""
    operation = str((tasks[0].metadata or {}).get("reduce_op", "sum"))
    kind = "send/recv" if tasks[0].kind == "send" else tasks[0].kind
    return kind if operation == "sum" else f"{kind} {operation}"


def _members_text(document: Document, tasks: Sequence[SuperTask]) -> str:
    slots = [str(task.device) for task in tasks]
    if tasks[0].kind == "send":
        return " → ".join(slots)
    return slots_text(slots, list(document.devices))


def _types_text(document: Document, tasks: Sequence[SuperTask]) -> str:
    """What the first member gives, and what is made of it where that is of another type."""
    given = next(name for task in tasks for name in task.inputs)
    made = next(name for task in tasks for name in task.outputs)
    types = dict.fromkeys((type_of(document, given), type_of(document, made)))
    return " → ".join(types)


# --- the tree of tasks ----------------------------------------------------------------------------
#
# What repeats is drawn once: slots that do the same with parts of the same weights share a branch,
# and supertasks that recur in turn (the layers of a stack) stand once under a count.


NAMES_SHOWN = 4
"""How many tensor names a line of the tree gives before it counts the rest."""

_ARROWS = {"send": "→", "recv": "←"}
_Tasks = Sequence[tuple[str, SuperTask]]


def supertask_tree(document: Document) -> Tree:
    """The pipeline's inputs, each slot with its supertasks in file order, and the outputs."""
    tree = Tree(Text(document.name, style="bold"))
    _add_slices(tree.add("inputs"), document, "inputs")
    lines = _Lines(document, communication_groups(document))
    for slots in _alike(document).values():
        title = Text.assemble((slots[0], "bold"), f"  {device_text(document.devices[slots[0]])}")
        if len(slots) > 1:
            title.append(f", likewise on {slots_text(slots[1:], list(document.devices))}")
        lines.add(tree.add(title), _tasks_of(document, slots[0]))
    _add_slices(tree.add("outputs"), document, "outputs")
    return tree


def _add_slices(branch: Tree, document: Document, side: str) -> None:
    """A line for each slice of the originals, with all slots that have it."""
    held: dict[tuple[str, object], list[str]] = {}
    slices = getattr(document.metadata.tensor_slices, side)
    for name, part in slices.items():
        held.setdefault((part.origin, part.placements), []).append(name)
    for names in held.values():
        part = slices[names[0]]
        shape = getattr(document.metadata.tensors, side)[part.origin].shape
        taken = format_slice(part.origin, part.placements, shape)
        slots = slots_text([str(slices[name].device) for name in names], list(document.devices))
        branch.add(
            Text(
                f"{names[0]}{' …' if len(names) > 1 else ''} {type_of(document, names[0])} "
                f"on {slots}, {f'all of {taken}' if taken == part.origin else taken}"
            )
        )


# --- slots that work alike ------------------------------------------------------------------------


def _tasks_of(document: Document, slot: str) -> list[tuple[str, SuperTask]]:
    return [(name, task) for name, task in document.supertasks.items() if task.device == slot]


def _alike(document: Document) -> dict[Hashable, list[str]]:
    """Slots that run the same graphs on slices of the same weights, the first one leading."""
    found: dict[Hashable, list[str]] = {}
    for slot in document.devices:
        work = tuple(_work(document, task) for _, task in _tasks_of(document, slot))
        found.setdefault(work, []).append(slot)
    return found


def _work(document: Document, task: SuperTask) -> Hashable:
    """What a supertask does, whatever its tensors and slots are called."""
    tensors = [document.tensors[name] for name in (*task.inputs, *task.outputs)]
    weights = tuple(info.value.name for info in tensors if info.value is not None)
    types = tuple((info.shape, info.dtype) for info in tensors)
    return (task.kind, task.data_blob or task.data, repr(task.metadata), weights, types)


# --- supertasks that recur ------------------------------------------------------------------------


class TaskRun(NamedTuple):
    """``times`` repetitions of ``period`` items, from ``start`` on."""

    start: int
    period: int
    times: int

    @property
    def covered(self) -> int:
        """How many items."""
        return self.period * self.times


def runs(keys: Sequence[Hashable]) -> Iterator[TaskRun]:
    """A sequence as runs that follow one another; what does not repeat is a run of one.

    From each place on the run that covers most is taken, of these the one of the shortest period.
    """
    start = 0
    while start < len(keys):
        found = TaskRun(start, 1, 1)
        for period in range(1, (len(keys) - start) // 2 + 1):
            run = TaskRun(start, period, _times(keys, start, period))
            if run.times > 1 and run.covered > found.covered:
                found = run
        yield found
        start += found.covered


def _times(keys: Sequence[Hashable], start: int, period: int) -> int:
    """How often the ``period`` items at ``start`` stand there one after another."""
    times = 1
    while all(
        at + period < len(keys) and keys[at] == keys[at + period]
        for at in range(start + (times - 1) * period, start + times * period)
    ):
        times += 1
    return times


# --- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lines:
    """Draws supertasks under a branch."""

    document: Document
    groups: dict[str, list[SuperTask]]

    def add(self, branch: Tree, tasks: _Tasks) -> None:
        """A line for each supertask, or for as many as there are in a run."""
        for run in runs([self._key(name, task) for name, task in tasks]):
            first = tasks[run.start : run.start + run.period]
            if run.times == 1 or run.period == 1:
                branch.add(self._line(tasks[run.start : run.start + run.covered]))
            else:
                self.add(branch.add(Text(f"{run.times} times, the first:")), first)

    def _key(self, name: str, task: SuperTask) -> Hashable:
        """What supertasks of a run have in common: the graph that they share, or the members."""
        if FAMILY_OF[task.kind] != "communication":
            return task.data_blob or ("alone", name)
        types = tuple(type_of(self.document, name) for name in (*task.inputs, *task.outputs))
        return (task.kind, tuple(self._others(task)), repr(task.metadata), types)

    def _others(self, task: SuperTask) -> list[str]:
        members = self.groups[str(task.group)]
        return [str(member.device) for member in members if member.device != task.device]

    def _line(self, run: _Tasks) -> Text:
        if FAMILY_OF[run[0][1].kind] == "communication":
            return self._communication(run)
        return self._compute(run)

    def _communication(self, run: _Tasks) -> Text:
        """One communication supertask, or several alike in a row; the type is the result's."""
        task = run[0][1]
        others = slots_text(self._others(task), list(self.document.devices))
        tensors = task.inputs + task.outputs
        return Text.assemble(
            (_names_of(run), "magenta"),
            f"  {task.kind} ",
            f"{len(run)} × " if len(run) > 1 else "",
            f"{_ARROWS.get(task.kind, '↔')} {others}: ",
            (f"{' → '.join(tensors)} {type_of(self.document, tensors[-1])}", "dim"),
        )

    def _compute(self, run: _Tasks) -> Text:
        """One compute supertask, or several in a row that run the same graph."""
        document, (name, task), (_, last) = self.document, run[0], run[-1]
        constants = constants_of(document, (task for _, task in run))
        stored = format_bytes(total_bytes(document, constants))
        variables = [name for name in task.inputs if not document.tensors[name].is_constant]
        return Text.assemble(
            (_names_of(run), "cyan"),
            f"  {task.kind} ",
            f"{len(run)} × " if len(run) > 1 else "",
            count_text(operator_count(document, name), "operator"),
            f", {count_text(len(constants), 'constant')} of {stored}" if constants else "",
            ": ",
            (f"{_names_text(variables)} → {_names_text(last.outputs)}", "dim"),
        )


def _names_of(run: _Tasks) -> str:
    return run[0][0] if len(run) == 1 else f"{run[0][0]} … {run[-1][0]}"


def _names_text(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    rest = len(names) - NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


# --- as text --------------------------------------------------------------------------------------


def type_of(document: Document, name: str) -> str:
    """The type of a document's tensor."""
    info = document.tensors[name]
    return tensor_text(info.dtype, info.shape)


def device_text(device: Device) -> str:
    """``cpu:0``, with the host in front where the file names one."""
    place = f"{device.kind}:{device.idx}"
    return f"{device.host}/{place}" if device.host else place


def slots_text(slots: Sequence[str], order: Sequence[str]) -> str:
    """Device slots; from four on, those that are neighbours in ``order`` as ``d0 … d3``."""
    first = order.index(slots[0])
    run = len(slots) > 3 and list(slots) == list(order[first : first + len(slots)])
    return f"{slots[0]} … {slots[-1]}" if run else ", ".join(slots)
