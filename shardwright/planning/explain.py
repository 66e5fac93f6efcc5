"""What differs between two plans, in words.

Input: two plans, of one graph or of two. Output: a `Difference`: settings, where nodes run,
how they are split, what slots carry, and what the plans say of themselves. Invariant: equal
plans have none and others have one, and the other way round it says the same with sides exchanged.

Nodes are told by where they stand in the model and what they do (`Plan.labels`), so that plans are
comparable that take different products apart, or belong to versions of one model. Neighbours that
change alike are one line, and so are equal nodes of equal layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import msgspec

from shardwright.clusters.cluster import device_text, links_text
from shardwright.costs.predict import Prediction
from shardwright.planning.plan import Assignment, Plan, split_text

MANY = 4
"""Of more slots than these only the first and the last are named."""


class Change(NamedTuple):
    """What was ``first`` and is ``second``."""

    what: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.what}: {self.first} -> {self.second}"


@dataclass(frozen=True, slots=True)
class Difference:
    """Changes from a first plan to a second, by what they are of."""

    sections: Mapping[str, tuple[Change, ...]]

    def __bool__(self) -> bool:
        return any(self.sections.values())

    def __str__(self) -> str:
        if not self:
            return "the plans are equal"
        found = ((title, changes) for title, changes in self.sections.items() if changes)
        return "\n".join(
            "\n".join([title, *(f"  {change}" for change in changes)]) for title, changes in found
        )


def difference(first: Plan, second: Plan) -> Difference:
    """What differs between two plans."""
    if first == second:
        return Difference({})
    pairs = _paired(first, second)
    sections = {
        "settings": tuple(_settings(first, second)),
        "how many nodes there are": tuple(_counts(first, second)),
        "where nodes run": tuple(
            _runs([(label, _place(first, i), _place(second, j)) for label, i, j in pairs])
        ),
        "how nodes are split": tuple(
            _groups([(label, _splits(first, i), _splits(second, j)) for label, i, j in pairs])
        ),
        "what slots carry": tuple(_by_slot(_load_texts, first, second)),
        "what is predicted": tuple(_predicted(first, second)),
        "what is said": tuple(_only(_said(first), _said(second))),
    }
    if not any(sections.values()):
        sections["what else is not the same"] = tuple(_elsewhere(first, second))
    return Difference(sections)


# --- settings -----------------------------------------------------------------------------------


def _settings(first: Plan, second: Plan) -> Iterator[Change]:
    for name, text in SETTINGS.items():
        a, b = text(first), text(second)
        if a != b:
            yield Change(name, a, b)


# --- nodes --------------------------------------------------------------------------------------


def _keys(plan: Plan) -> list[tuple[str, int]]:
    """For each node its label, and how many before it have the same."""
    seen: Counter[str] = Counter()
    keys = []
    for label in plan.labels or [f"node {i}" for i in range(len(plan.nodes))]:
        keys.append((label, seen[label]))
        seen[label] += 1
    return keys


def _paired(first: Plan, second: Plan) -> list[tuple[str, int, int]]:
    """The label and the two positions of each node that both plans have."""
    there = {key: j for j, key in enumerate(_keys(second))}
    return [(key[0], i, there[key]) for i, key in enumerate(_keys(first)) if key in there]


def _counts(first: Plan, second: Plan) -> Iterator[Change]:
    found = [Counter(map(_pattern, plan.labels)) for plan in (first, second)]
    for label in sorted(found[0].keys() | found[1].keys()):
        a, b = (count[label] for count in found)
        if a != b:
            yield Change(label, str(a), str(b))


def _place(plan: Plan, node: int) -> str:
    """The stage and the slots of a node."""
    devices = plan.assignments[plan.nodes[node]].mesh.devices
    stages = plan.training.stages if plan.training is not None else plan.stages
    return (f"stage {stages[node]} on " if stages else "") + _named(devices)


def _named(devices: Sequence[str]) -> str:
    if len(devices) <= MANY:
        return " ".join(devices)
    return f"{devices[0]} … {devices[-1]} ({len(devices)} slots)"


def _splits(plan: Plan, node: int) -> str:
    assignment: Assignment = plan.assignments[plan.nodes[node]]
    return split_text(assignment.mesh.axes, assignment.splits)


# --- lines --------------------------------------------------------------------------------------

_Item = tuple[str, str, str]
"""A name, and what it is in the first and in the second plan."""


def _runs(items: Sequence[_Item]) -> Iterator[Change]:
    """A change for each run of neighbours that change alike."""
    for (a, b), run in groupby(items, key=lambda item: item[1:]):
        labels = [item[0] for item in run]
        if a != b:
            yield Change(_span(labels), a, b)


def _span(labels: Sequence[str]) -> str:
    if len(labels) == 1:
        return labels[0]
    return f"{labels[0]} … {labels[-1]} ({len(labels)})"


def _groups(items: Sequence[_Item]) -> Iterator[Change]:
    """A change for all nodes of equal layers that change alike, in the order of the first."""
    groups: dict[_Item, list[str]] = {}
    for label, a, b in items:
        if a != b:
            groups.setdefault((_pattern(label), a, b), []).append(label)
    for (pattern, a, b), labels in groups.items():
        one = len(set(labels)) == 1
        name = labels[0] if one else pattern
        yield Change(name if len(labels) == 1 else f"{name} ({len(labels)})", a, b)


def _pattern(label: str) -> str:
    """A label without the numbers of layers."""
    return re.sub(r"(?<![^.\s])\d+(?![^.:\s])", "*", label)


# --- slots --------------------------------------------------------------------------------------


def _by_slot(
    texts: Callable[[Plan], Mapping[str, str]], first: Plan, second: Plan
) -> Iterator[Change]:
    """A change for each run of slots of which the texts change alike."""
    a, b = texts(first), texts(second)
    names = list(dict.fromkeys([*a, *b]))
    yield from _runs([(name, a.get(name, "none"), b.get(name, "none")) for name in names])


def _load_texts(plan: Plan) -> dict[str, str]:
    """What each slot carries, by its name."""
    work = sum(load.work for load in plan.loads) or 1
    return {
        load.device: f"{100 * load.work / work:.1f}% of the work, "
        f"{load.stored_bytes / 1e6:.2f} MB stored, receives {load.received_bytes / 1e6:.3f} MB"
        for load in plan.loads
    }


# --- predictions --------------------------------------------------------------------------------


def _predicted(first: Plan, second: Plan) -> Iterator[Change]:
    """Times, and the memory of each slot; nothing where no plan has a prediction."""
    for name, text in PREDICTIONS.items():
        a, b = text(first.prediction), text(second.prediction)
        if a != b:
            yield Change(name, a, b)
    yield from _by_slot(_memory_texts, first, second)


def _memory_texts(plan: Plan) -> dict[str, str]:
    """What each slot holds at most, item by item."""
    if plan.prediction is None:
        return {}
    return {f"memory of {slot.device}": str(slot.memory) for slot in plan.prediction.slots}


PREDICTIONS: dict[str, Callable[[Prediction | None], str]] = {
    "a step": lambda found: "unknown" if found is None else _milliseconds(found.step_time),
    "a captured batch": lambda found: (
        "unknown" if found is None else _milliseconds(found.per_microbatch)
    ),
    "latency": lambda found: "unknown" if found is None else _milliseconds(found.latency),
}


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


# --- words --------------------------------------------------------------------------------------


def _said(plan: Plan) -> list[str]:
    """What a plan says of itself: its notes, and why it is as it is."""
    said = [f"note: {note}" for note in plan.notes]
    why = plan.explanation
    return said if why is None else [*said, *why.items()]


def _only(first: Sequence[str], second: Sequence[str]) -> Iterator[Change]:
    """A change for each text that one side has more often than the other."""
    counts = Counter(first), Counter(second)
    for text in dict.fromkeys([*first, *second]):
        a, b = (count[text] for count in counts)
        if a != b:
            yield Change(text, _times(a), _times(b))


def _times(count: int) -> str:
    return ("not there", "there")[count] if count < 2 else f"{count} times"


def _elsewhere(first: object, second: object, place: str = "") -> Iterator[Change]:
    """The values that are not the same, by their place: ``training.work[1]: 5 -> 6``."""
    if first == second:
        return
    if isinstance(first, msgspec.Struct) and type(first) is type(second):
        for name in first.__struct_fields__:
            inner = f"{place}.{name}" if place else name
            yield from _elsewhere(getattr(first, name), getattr(second, name), inner)
    elif isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _elsewhere(a, b, f"{place}[{i}]")
    else:
        yield Change(place, str(first), str(second))


# --- settings in words ----------------------------------------------------------------------------


def _of_training(name: str) -> Callable[[Plan], str]:
    def text(plan: Plan) -> str:
        found = getattr(plan.training, name, None)
        return "none" if found is None else str(found)

    return text


def _bubble(plan: Plan) -> str:
    return "none" if plan.training is None else f"{100 * plan.training.bubble():.1f}%"


def _grids(plan: Plan) -> str:
    grids = {
        " × ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
        for mesh in (assignment.mesh for assignment in plan.assignments)
    }
    return " and ".join(sorted(grid or "one slot" for grid in grids))


def _machines(plan: Plan) -> str:
    if plan.cluster is None:
        return "unknown"
    several = len(plan.cluster.hosts) > 1
    between = f", {links_text(plan.cluster.between)} between" if several else ""
    inside = links_text(plan.cluster.inside)
    return f"{_hosts(plan)}, {device_text(plan.cluster.device)}, {inside} inside{between}"


def _hosts(plan: Plan) -> str:
    """How many hosts, and how many slots each has: ``4 hosts (3 × 8 + 2 slots)``."""
    assert plan.cluster is not None
    hosts = plan.cluster.hosts
    if len(hosts) == 1:
        return "1 host"
    runs = [(size, len(list(run))) for size, run in groupby(map(len, hosts))]
    sizes = " + ".join(f"{count} × {size}" if count > 1 else str(size) for size, count in runs)
    return f"{len(hosts)} hosts ({sizes} slots)"


SETTINGS: Mapping[str, Callable[[Plan], str]] = {
    "graph": lambda plan: f"{plan.graph} ({plan.fingerprint})",
    "inputs": lambda plan: ", ".join(plan.inputs) or "unknown",
    "policy": lambda plan: plan.policy,
    "slots": lambda plan: str(len(plan.devices)),
    "machines": _machines,
    "mesh of a stage": _grids,
    "fused products taken apart": lambda plan: str(len(plan.unfused)),
    "virtual stages": lambda plan: str(len(plan.training.placement)) if plan.training else "none",
    **{
        name: _of_training(name)
        for name in ("microbatches", "schedule", "chunks", "recompute", "memory", "zero")
    },
    "bubble": _bubble,
}
"""What a line says of each of two plans, where it is not the same."""
