"""The work of one module's forward: its items as steps, chains of calls as loops, and names.

Comes in: what goes in and out of the forward. Goes out: `Work` that `write_body` writes. What
always holds: there is a step for each item, or a loop for a chain of them, in the items' order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardwright.codegenerate.spelling.forms import Mode
from shardwright.codegenerate.spelling.table import is_typed, spell
from shardwright.codegenerate.splitting.collectives import is_collective, spell_collective
from shardwright.codegenerate.stage import Program
from shardwright.codegenerate.writing.backwards import spell_with_backward
from shardwright.codegenerate.writing.classes import DICTIONARY, Classes
from shardwright.codegenerate.writing.flow import Flow
from shardwright.codegenerate.writing.hints import Act, wanted_names
from shardwright.codegenerate.writing.loops import as_loop, chains
from shardwright.codegenerate.writing.modules import Module
from shardwright.codegenerate.writing.names import identifier, is_plain
from shardwright.codegenerate.writing.order import Call, Item, keeps_its_place
from shardwright.codegenerate.writing.origins import call_site
from shardwright.codegenerate.writing.step import Loop, ModuleCall, Step, Work
from shardwright.ir import SLOT, WITH_BACKWARD, IRNode, resolve
from shardwright.ir.operators import is_marker, signature
from shardwright.ir.values import Source


def forward_work(program: Program, classes: Classes, flow: Flow, *, verbose: bool) -> Work:
    """What the forward of the module of ``flow`` does, to be written."""
    return _Forward(program, classes, flow).work(verbose=verbose)


class _Forward:
    """What the forward of one module does, as steps."""

    def __init__(self, program: Program, classes: Classes, flow: Flow) -> None:
        self.program = program
        self.classes = classes
        self.flow = flow
        self.graph = flow.graph
        self.construction = flow.construction

    def work(self, *, verbose: bool) -> Work:
        """All of it."""
        flow = self.flow
        ends = [*flow.results, *flow.updates.values()]
        needed = {*ends, *(v for item in flow.items for v in flow.reads(item))}
        steps = self._steps(needed)
        uses = Counter(ends)
        for step in steps:
            uses.update(step.reads)
        loops = self._fold(steps, uses)
        return Work(
            steps=steps,
            arguments=flow.arguments,
            results=flow.results,
            updates=[(flow.buffer(old), new) for old, new in flow.updates.items()],
            stored=flow.stored,
            names=self._names(),
            pinned=frozenset(flow.arguments[:1] if self._asks_for_device() else ()),
            taken=frozenset({"i", "self"} if loops else {"self"}) | {loop.item for loop in loops},
            large=self._large(),
            verbose=verbose,
        )

    # --- steps --------------------------------------------------------------------------------

    def _fold(self, steps: list[Step | Loop], uses: Mapping[int, int]) -> list[Loop]:
        """Put loops in the place of chains of calls; gives the loops."""
        calls = [self._module_call(item) for item in self.flow.items]
        loops = []
        for start, stop, carried in reversed(chains(calls, uses)):
            chain = [call for call in calls[start:stop] if call is not None]
            parent = self._container(self.flow.items[start])
            siblings = [child.name for child in self.construction.children(parent)]
            loops.append(as_loop(chain, carried, siblings))
            steps[start:stop] = [loops[-1]]
        return loops

    def _steps(self, needed: set[int]) -> list[Step | Loop]:
        return [
            self._operator(item, needed) if isinstance(item, IRNode) else self._call(item, needed)
            for item in self.flow.items
        ]

    def _operator(self, node: IRNode, needed: set[int]) -> Step:
        one = is_marker(node.op) or signature(resolve(node.op)).returns_one
        device = self.flow.arguments[:1] if SLOT in node.attrs.values() else ()
        return Step(
            reads=(*node.inputs, *device),
            makes=tuple(v if v in needed else None for v in node.results),
            write=lambda operands: self._spell(node, operands),
            is_tuple=not one,
            stays=keeps_its_place(node),
            typed=is_typed,
            source=node.source,
        )

    def _spell(self, node: IRNode, operands: Mapping[int, str]) -> str:
        if is_collective(node):
            return spell_collective(node, operands)
        if node.op == WITH_BACKWARD:
            return spell_with_backward(node, operands, self.classes)
        mode = Mode(self.program.training, device=self._device(operands))
        return spell(self.graph, node, operands, mode)

    def _call(self, call: Call, needed: set[int]) -> Step:
        callee = self.construction.module(self.flow.module, call.module)
        reads, makes = self.flow.reads(call), self.flow.makes(call)
        source = self._source(call)
        return Step(
            reads=reads,
            makes=tuple(v if v in needed else None for v in makes),
            write=lambda operands: f"{callee}({', '.join(operands[v] for v in reads)})",
            is_tuple=len(makes) > 1,
            stays=source is None or any(map(keeps_its_place, call.nodes)),
            typed=lambda expression: False,
            source=source,
        )

    def _module_call(self, item: Item) -> ModuleCall | None:
        """An item as a call of one of several modules that stand beside one another."""
        if not isinstance(item, Call) or is_plain(item.module.name):
            return None
        made, parent = self.flow.made[item.module], self._container(item)
        if parent is self.flow.module or self.construction.made(parent).kind != DICTIONARY:
            return None
        return ModuleCall(
            callee=self.construction.module(self.flow.module, item.module),
            arguments=self.flow.reads(item),
            results=tuple(v for v in self.flow.makes(item) if v is not None),
            constructor=made.constructor,
            container=self.construction.module(self.flow.module, parent),
            key=item.module.name,
        )

    def _container(self, item: Item) -> Module:
        assert isinstance(item, Call)
        return item.module.parent or self.flow.module

    def _large(self) -> frozenset[int]:
        """Values made here that are at least a quarter of the largest."""
        made = {v for item in self.flow.items for v in self.flow.makes(item) if v is not None}
        sizes = {value_id: self.graph.values[value_id].nbytes for value_id in made}
        most = max(sizes.values(), default=0)
        return frozenset(value_id for value_id, size in sizes.items() if 4 * size >= most)

    # --- names and devices --------------------------------------------------------------------

    def _names(self) -> dict[int, str]:
        acts = [self._act(item) for item in self.flow.items]
        outward = [*self.flow.results, *self.flow.updates.values()]
        names = wanted_names(self.graph, acts, self.flow.arguments, outward)
        for value_id in self.flow.arguments:
            if self.graph.values[value_id].is_stored:
                names[value_id] = self._stored_name(value_id)
        if not self.flow.module.path:
            for port in self.flow.stage.inputs:
                if port.name in self.program.inputs:
                    names[port.value] = identifier(port.name)
        return names

    def _act(self, item: Item) -> Act:
        makes = tuple(v for v in self.flow.makes(item) if v is not None)
        if isinstance(item, IRNode):
            return Act(tuple(item.inputs), makes, item.source)
        made = self.flow.made[item.module]
        named = is_plain(item.module.name) and len(makes) == 1
        gives = (item.module.name,) if named else made.gives
        return Act(self.flow.reads(item), makes, self._source(item), made.takes, gives)

    def _source(self, call: Call) -> Source | None:
        """Where a module is called, as far as it is known."""
        if call.layer is not None:
            return call.nodes[0].source
        if call.module.parent is self.flow.module:
            return call_site(self.flow.module.cls, call.module.name)
        return None

    def _stored_name(self, value_id: int) -> str:
        """The name of a parameter that is an argument: its module's and its own."""
        home = self.flow.calls.tree.homes[value_id][0]
        module = home.module.name
        return identifier(f"{module}_{home.name}" if is_plain(module) else home.name)

    def _asks_for_device(self) -> bool:
        nodes = (item for item in self.flow.items if isinstance(item, IRNode))
        return any(SLOT in node.attrs.values() for node in nodes)

    def _device(self, operands: Mapping[int, str]) -> str | None:
        """An expression for the device that the module runs on: that of its first argument."""
        if self.flow.arguments and self.flow.arguments[0] in operands:
            return f"{operands[self.flow.arguments[0]]}.device"
        if self.flow.stored:
            return f"{next(iter(self.flow.stored.values()))}.device"
        return None
