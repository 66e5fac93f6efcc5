"""What the forward of one module does: its steps, and chains of calls of equal modules as loops.

Of the stage itself arguments and results are in the order of its ports; of other modules each value
comes once, in the order in which it is read or made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwright.codegenerate.spelling.forms import Mode, quoted
from shardwright.codegenerate.spelling.table import spell
from shardwright.codegenerate.splitting.collectives import is_collective, spell_collective
from shardwright.codegenerate.stages import Stage, StageProgram
from shardwright.codegenerate.writing.calls import Calls, Item, ModuleCall, keeps_its_place
from shardwright.codegenerate.writing.classes import DICTIONARY, Classes, spell_with_backward
from shardwright.codegenerate.writing.construction import Construction, number_range
from shardwright.codegenerate.writing.modules import Home, Module
from shardwright.codegenerate.writing.names import (
    NamedStep,
    call_site,
    identifier,
    is_plain,
    item_name,
    wanted_names,
)
from shardwright.codegenerate.writing.statements import ForwardSteps, Loop, Step
from shardwright.ir import SLOT, WITH_BACKWARD, IRNode, resolve
from shardwright.ir.operators import is_marker, signature
from shardwright.ir.values import Source


class ModuleForward:
    """What one module's forward reads, makes and does.

    made
        How the modules that it calls are made.
    updates
        Buffers that it changes in the end, with the values that are then in them.
    stored
        How each stored value is reached that lies inside the module.
    arguments, results
        What it is given and gives, value ids.
    """

    def __init__(
        self, stage: Stage, calls: Calls, construction: Construction, module: Module
    ) -> None:
        self.stage, self.graph = stage, stage.graph
        self.calls, self.construction, self.module = calls, construction, module
        self.items = calls.items[module]
        self.updates = calls.updates[module]
        called = [item.module for item in self.items if isinstance(item, ModuleCall)]
        self.made = {inner: construction.made(inner) for inner in called}
        self._read = [v for item in self.items for v in self._reads(item)]
        self.stored = dict(self._stored())
        self.results = self._results()
        self.arguments = self._arguments()

    # --- what goes in and out -----------------------------------------------------------------

    def _reads(self, item: Item) -> tuple[int, ...]:
        """What an item reads, one an operand or argument."""
        if isinstance(item, IRNode):
            return tuple(item.inputs)
        return (item.layer or self.made[item.module]).arguments

    def _makes(self, item: Item) -> tuple[int | None, ...]:
        """What an item makes; None for what its operator leaves out."""
        if isinstance(item, IRNode):
            return tuple(item.results)
        return (item.layer or self.made[item.module]).results

    def _stored(self) -> Iterator[tuple[int, str]]:
        returned = self.graph.outputs if not self.module.path else []
        for value_id in dict.fromkeys([*self._read, *self.updates, *returned]):
            for home in self._homes_inside(value_id):
                # Somebody, or autograd, may keep what it held before it is written to.
                copied = ".clone()" if value_id in self.calls.written else ""
                yield value_id, f"{self.construction.tensor(self.module, home)}{copied}"
                break

    def _homes_inside(self, value_id: int) -> Iterator[Home]:
        homes = self.calls.tree.homes.get(value_id, ())
        return (home for home in homes if self.module in home.module.upwards())

    def _results(self) -> tuple[int, ...]:
        if not self.module.path:
            return tuple(port.value for port in self.stage.outputs)
        # New contents leave the module where they replace what a buffer around it holds.
        kept = self.calls.kept.items()
        leaving = {new for new, keeper in kept if self.module not in keeper.upwards()}
        leaving.update(self.graph.outputs)
        made = (v for item in self.items for v in self._makes(item) if v is not None)
        return tuple(v for v in made if v in leaving or self.calls.is_read_outside(self.module, v))

    def _arguments(self) -> tuple[int, ...]:
        if not self.module.path:
            return tuple(port.value for port in self.stage.inputs)
        made = {v for item in self.items for v in self._makes(item)}
        read = dict.fromkeys([*self._read, *self.updates.values()])
        return tuple(v for v in read if v not in made and v not in self.stored)

    # --- steps --------------------------------------------------------------------------------

    def steps(self, program: StageProgram, classes: Classes, *, verbose: bool) -> ForwardSteps:
        """What the forward does, to be written."""
        ends = [*self.results, *self.updates.values()]
        needed = {*ends, *self._read}
        steps: list[Step | Loop] = [
            self._operator(item, needed, program, classes)
            if isinstance(item, IRNode)
            else self._call(item, needed)
            for item in self.items
        ]
        uses = Counter(ends)
        for step in steps:
            uses.update(step.reads)
        loops = self._fold(steps, uses)
        asks_for_device = any(map(_names_device, self.items))
        return ForwardSteps(
            steps=steps,
            arguments=self.arguments,
            results=self.results,
            updates=[(self._buffer(old), new) for old, new in self.updates.items()],
            stored=self.stored,
            names=self._names(program),
            pinned=frozenset(self.arguments[:1] if asks_for_device else ()),
            reserved=frozenset(
                {"self", *(("i",) if loops else ()), *(loop.item for loop in loops)}
            ),
            verbose=verbose,
        )

    def _buffer(self, value_id: int) -> str:
        """How a buffer that the forward changes is reached."""
        return self.construction.tensor(self.module, next(self._homes_inside(value_id)))

    def _operator(
        self, node: IRNode, needed: set[int], program: StageProgram, classes: Classes
    ) -> Step:
        def write(operands: Mapping[int, str]) -> str:
            if is_collective(node):
                return spell_collective(node, operands)
            if node.op == WITH_BACKWARD:
                return spell_with_backward(node, operands, classes)
            mode = Mode(program.training, device=self._device(operands))
            return spell(self.graph, node, operands, mode)

        device = self.arguments[:1] if _names_device(node) else ()
        return Step(
            reads=(*node.inputs, *device),
            makes=tuple(v if v in needed else None for v in node.results),
            write=write,
            is_tuple=not is_marker(node.op) and not signature(resolve(node.op)).returns_one,
            stays=keeps_its_place(node),
            source=node.source,
        )

    def _call(self, call: ModuleCall, needed: set[int]) -> Step:
        callee = self.construction.module(self.module, call.module)
        reads, makes, source = self._reads(call), self._makes(call), self._source(call)
        return Step(
            reads=reads,
            makes=tuple(v if v in needed else None for v in makes),
            write=lambda operands: f"{callee}({', '.join(operands[v] for v in reads)})",
            is_tuple=len(makes) > 1,
            stays=source is None or any(map(keeps_its_place, call.nodes)),
            source=source,
        )

    def _device(self, operands: Mapping[int, str]) -> str | None:
        """An expression for the device that the module runs on: that of its first argument."""
        if self.arguments and self.arguments[0] in operands:
            return f"{operands[self.arguments[0]]}.device"
        if self.stored:
            return f"{next(iter(self.stored.values()))}.device"
        return None

    # --- loops --------------------------------------------------------------------------------

    def _fold(self, steps: list[Step | Loop], uses: Mapping[int, int]) -> list[Loop]:
        """Put loops in the place of chains of calls; gives the loops."""
        calls = [self._sibling_call(item) for item in self.items]
        loops = []
        for start, stop, carried in reversed(chains(calls, uses)):
            chain = [call for call in calls[start:stop] if call is not None]
            first = self.items[start]
            assert isinstance(first, ModuleCall)
            parent = first.module.parent or self.module
            siblings = [child.name for child in self.construction.children(parent)]
            loops.append(as_loop(chain, carried, siblings))
            steps[start:stop] = [loops[-1]]
        return loops

    def _sibling_call(self, item: Item) -> SiblingCall | None:
        """An item as a call of one of several modules that stand beside one another."""
        if not isinstance(item, ModuleCall) or is_plain(item.module.name):
            return None
        parent = item.module.parent or self.module
        if parent is self.module or self.construction.made(parent).kind != DICTIONARY:
            return None
        return SiblingCall(
            arguments=self._reads(item),
            results=tuple(v for v in self._makes(item) if v is not None),
            constructor=self.made[item.module].constructor,
            container=self.construction.module(self.module, parent),
            key=item.module.name,
        )

    # --- names --------------------------------------------------------------------------------

    def _names(self, program: StageProgram) -> dict[int, str]:
        steps = [self._named_step(item) for item in self.items]
        outward = [*self.results, *self.updates.values()]
        names = wanted_names(self.graph, steps, self.arguments, outward)
        for value_id in self.arguments:
            if self.graph.values[value_id].is_stored:
                names[value_id] = self._stored_name(value_id)
        if not self.module.path:
            for port in self.stage.inputs:
                if port.name in program.inputs:
                    names[port.value] = identifier(port.name)
        return names

    def _named_step(self, item: Item) -> NamedStep:
        makes = tuple(v for v in self._makes(item) if v is not None)
        if isinstance(item, IRNode):
            return NamedStep(tuple(item.inputs), makes, item.source)
        made = self.made[item.module]
        named = is_plain(item.module.name) and len(makes) == 1
        gives = (item.module.name,) if named else made.gives
        return NamedStep(self._reads(item), makes, self._source(item), made.takes, gives)

    def _source(self, call: ModuleCall) -> Source | None:
        """Where a module is called, as far as it is known."""
        if call.layer is not None:
            return call.nodes[0].source
        if call.module.parent is self.module:
            return call_site(self.module.cls, call.module.name)
        return None

    def _stored_name(self, value_id: int) -> str:
        """The name of a parameter that is an argument: its module's and its own."""
        home = self.calls.tree.homes[value_id][0]
        module = home.module.name
        return identifier(f"{module}_{home.name}" if is_plain(module) else home.name)


def _names_device(item: Item) -> bool:
    return isinstance(item, IRNode) and SLOT in item.attrs.values()


# --- chains of calls ------------------------------------------------------------------------------


class SiblingCall(NamedTuple):
    """A call of a module that stands beside others in ``container``, under ``key``.

    ``constructor`` is what makes it.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    constructor: str
    container: str
    key: str


def chains(
    calls: Sequence[SiblingCall | None], uses: Mapping[int, int]
) -> list[tuple[int, int, int]]:
    """Start, stop and carried argument of each chain; ``uses`` counts how often values are read.

    In a chain each call's one result is read by the next call alone, as the same argument, and all
    other arguments are the same. ``calls`` has None where a step is none of a sibling.
    """
    found = []
    start = 0
    while start < len(calls):
        stop, carried = start + 1, -1
        while stop < len(calls):
            place = _carried(calls[stop - 1], calls[stop], uses)
            if place is None or carried not in (-1, place):
                break
            carried, stop = place, stop + 1
        if stop - start > 1:
            found.append((start, stop, carried))
        start = stop
    return found


def _carried(
    before: SiblingCall | None, here: SiblingCall | None, uses: Mapping[int, int]
) -> int | None:
    """Which argument of a call is the result of the one before; None where they are no chain."""
    if before is None or here is None or len(before.results) != 1 or len(here.results) != 1:
        return None
    (result,) = before.results
    same = (before.container, before.constructor) == (here.container, here.constructor)
    if not same or uses.get(result, 0) != 1 or result not in here.arguments:
        return None
    place = here.arguments.index(result)
    pairs = enumerate(zip(before.arguments, here.arguments, strict=True))
    return place if all(a == b for at, (a, b) in pairs if at != place) else None


def as_loop(chain: Sequence[SiblingCall], carried: int, siblings: Sequence[str]) -> Loop:
    """A chain as a loop; ``siblings`` are the names of all that stand in the container."""
    first, keys = chain[0], [call.key for call in chain]
    item = item_name(first.constructor.partition("(")[0].rpartition(".")[2])
    if keys == list(siblings):
        over, callee = f"{first.container}.values()", item
    else:
        numbers = number_range(keys)
        over = numbers or f"({', '.join(map(quoted, keys))})"
        item, callee = "i", f"{first.container}[{'str(i)' if numbers else 'i'}]"
    return Loop(over, item, callee, first.arguments, carried, chain[-1].results[0])
