"""A stage as classes: each module with a forward, or that holds what others use, in turn.

Comes in: a stage. Goes out: its class, and those inside it, in `Classes`. What always holds: the
stage's forward does what its graph does, with tensors under the original's names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardwright.codegenerate.expression import Expression
from shardwright.codegenerate.spelling import Mode, is_typed, spell
from shardwright.codegenerate.spelling.literals import described
from shardwright.codegenerate.splitting.collectives import SLOTS, is_collective, spell_collective
from shardwright.codegenerate.splitting.split_text import (
    BASE,
    MODULE_PARAMETERS,
    STAGE_PARAMETERS,
    is_split,
    slices_field,
    slots_expression,
)
from shardwright.codegenerate.stage import Program, Stage
from shardwright.codegenerate.writing.body import Body, Work, write_body
from shardwright.codegenerate.writing.calls import Calls, calls_of
from shardwright.codegenerate.writing.classes import MODULE, Classes, ClassText, forward_lines
from shardwright.codegenerate.writing.construction import Construction, Made
from shardwright.codegenerate.writing.containers import sequential
from shardwright.codegenerate.writing.hints import Act, wanted_names
from shardwright.codegenerate.writing.loops import as_loop, chains
from shardwright.codegenerate.writing.modules import Home, Module, model_names, module_tree
from shardwright.codegenerate.writing.names import class_stem, identifier, is_plain
from shardwright.codegenerate.writing.order import Call, Item, keeps_its_place
from shardwright.codegenerate.writing.origins import call_site
from shardwright.codegenerate.writing.step import Loop, ModuleCall, Step
from shardwright.ir import SLOT, IRNode, resolve
from shardwright.ir.aliasing import memory_roots
from shardwright.ir.operators import is_marker, signature
from shardwright.ir.values import Source

SEQUENTIAL = "torch.nn.modules.container.Sequential"


def write_stage(
    program: Program, stage: Stage, classes: Classes, doc: Sequence[str], *, verbose: bool
) -> str:
    """Define the classes of a stage; gives the name of its own."""
    return _Writer(program, stage, classes, tuple(doc), verbose).write().kind


@dataclass(eq=False)
class _Writer:
    """Writes the classes of one stage."""

    program: Program
    stage: Stage
    classes: Classes
    doc: tuple[str, ...]
    verbose: bool
    calls: Calls = field(init=False)
    construction: Construction = field(init=False)

    def __post_init__(self) -> None:
        self.graph = self.stage.graph
        tree = module_tree(self.graph, model_names(self.program))
        self.calls = calls_of(self.graph, tree, training=self.program.training)
        self.construction = Construction(self.stage, self.calls, self.module)
        self.root = self.calls.tree.root
        self.left = {*self.graph.outputs, *self.graph.updates.values()}
        self.outliving = self._outliving()

    def _outliving(self) -> frozenset[int]:
        """Buffers whose old contents are seen, as they are or in views, after they change."""
        roots = memory_roots(self.graph) if self.graph.updates else {}
        views: dict[int, list[int]] = {}
        for value_id, below in roots.items():
            for old in below & self.graph.updates.keys():
                views.setdefault(old, []).append(value_id)
        return frozenset(
            old
            for module, updates in self.calls.updates.items()
            for old in updates
            if any(self._is_seen_outside(module, view) for view in views[old])
        )

    def _is_seen_outside(self, module: Module, value_id: int) -> bool:
        """Whether a value is read when the forward of ``module`` has changed its buffers."""
        users = self.graph.values[value_id].users
        return value_id in self.left or not self.calls.nodes[module].issuperset(users)

    def write(self) -> Made:
        return self.module(self.root)

    def module(self, module: Module) -> Made:
        """Define the class of a module that is called, or that holds what others use."""
        if module not in self.calls.items:
            return self._define(module, None, (), ())
        if module.cls == SEQUENTIAL and (found := self._sequential(module)) is not None:
            return found
        forward = _Forward(self, module)
        body = write_body(forward.work())
        return self._define(module, body, forward.arguments, forward.results)

    def _define(
        self,
        module: Module,
        body: Body | None,
        arguments: tuple[int, ...],
        results: tuple[int, ...],
    ) -> Made:
        text = ClassText(
            stem=class_stem(module.cls, module.path) if module.path else self.stage.name,
            doc=self.doc if not module.path else _doc(module),
            fields=tuple(self.construction.fields(module)),
            parameters=(),
            init=tuple(self.construction.statements(module)),
            forward=forward_lines(body) if body is not None else (),
            base=self.construction.base(module),
        )
        given = ""
        if not module.path and is_split(self.stage):
            text = self._split(text)
        elif self._knows_slots(module):
            given = f"self.{SLOTS}"
            init = (f"self.{SLOTS} = {SLOTS}", *text.init)
            text = replace(text, parameters=MODULE_PARAMETERS, init=init)
        slot = f"{self.stage.name}Slot{self.stage.index}"
        name = self.classes.define(text, None if module.path else self.stage.name, slot)
        takes, gives = (body.arguments, body.results) if body is not None else ((), ())
        return Made(f"{name}({given})", name, arguments, results, takes, gives)

    def _split(self, text: ClassText) -> ClassText:
        """The class of a stage that is one of several slots'."""
        return replace(
            text,
            fields=(slices_field(self.stage), *text.fields),
            parameters=STAGE_PARAMETERS,
            base=BASE if text.base == MODULE else f"{BASE}, {text.base}",
            base_arguments=slots_expression(self.stage),
        )

    def _knows_slots(self, module: Module) -> bool:
        """Whether a module, or one inside it, communicates with other slots."""
        items = self.calls.items.get(module, ())
        nodes = (item for item in items if isinstance(item, IRNode))
        inside = self.construction.children(module)
        return any(map(is_collective, nodes)) or any(map(self._knows_slots, inside))

    def _sequential(self, module: Module) -> Made | None:
        """A module as an nn.Sequential, where its calls are a chain of its children."""
        calls = [item for item in self.calls.items[module] if isinstance(item, Call)]
        children = [call.module for call in calls]
        others = {m for m in self.construction.children(module) if m not in children}
        whole = len(calls) == len(self.calls.items[module]) and len(set(children)) == len(children)
        if not whole or others or module.tensors or self.calls.updates[module]:
            return None
        if any(child.parent is not module for child in children):
            return None
        made = [self.construction.made(child) for child in children]
        if any((len(one.arguments), len(one.results)) != (1, 1) for one in made):
            return None
        for before, one in pairwise(made):
            outside = set(self.graph.values[before.results[0]].users) - self.calls.nodes[module]
            if before.results != one.arguments or outside or before.results[0] in self.left:
                return None
        items = [(child.name, one.constructor) for child, one in zip(children, made, strict=True)]
        return Made(sequential(items), "nn.Sequential", made[0].arguments, made[-1].results)


def _doc(module: Module) -> tuple[str, ...]:
    package, _, name = module.cls.rpartition(".")
    if not package or package.startswith("torch.nn.") or "<" in package or len(package) > 60:
        return ()
    return (f'"""{described(f"{name} of {package}")}."""',)


class _Forward:
    """What the forward of one module does, as steps."""

    def __init__(self, writer: _Writer, module: Module) -> None:
        self.writer = writer
        self.module = module
        self.graph = writer.graph
        self.items = writer.calls.items[module]
        self.inside = writer.calls.nodes[module]
        self.updates = writer.calls.updates[module]
        self.made = {
            item.module: writer.construction.made(item.module)
            for item in self.items
            if isinstance(item, Call)
        }
        self.reads = {id(item): self._reads(item) for item in self.items}
        self.stored = dict(self._stored())
        self.results = self._results()
        self.arguments = self._arguments()
        self.wanted: dict[int, str] = {}

    # --- what goes in and out ---------------------------------------------------------------

    def _reads(self, item: Item) -> tuple[int, ...]:
        if isinstance(item, IRNode):
            return tuple(item.inputs)
        if item.layer is not None:
            return item.layer.arguments
        return self.made[item.module].arguments

    def _makes(self, item: Item) -> tuple[int | None, ...]:
        if isinstance(item, IRNode):
            return tuple(item.results)
        if item.layer is not None:
            return item.layer.results
        return self.made[item.module].results

    def _stored(self) -> Iterator[tuple[int, Expression]]:
        """How stored values inside the module are reached."""
        read = [v for reads in self.reads.values() for v in reads]
        for value_id in dict.fromkeys([*read, *self.updates, *self._returned()]):
            for home in self.writer.calls.tree.homes.get(value_id, ()):
                if self.module in home.module.upwards():
                    copied = ".clone()" if self._is_kept(value_id) else ""
                    yield value_id, Expression(f"{self._reach(home)}{copied}")
                    break

    def _reach(self, home: Home) -> Expression:
        return self.writer.construction.tensor(self.module, home)

    def _is_kept(self, value_id: int) -> bool:
        """Whether somebody, or autograd, may keep what a buffer held before it is written to."""
        if value_id in self.writer.outliving:
            return True
        if value_id not in self.writer.calls.written:
            return False
        own = [item for item in self.items if isinstance(item, IRNode) and value_id in item.inputs]
        others = {v for node in own for v in node.inputs} - {value_id}
        return any(not self._is_buffer(v) for v in others)

    def _is_buffer(self, value_id: int) -> bool:
        return self.graph.values[value_id].role in ("buffer", "constant")

    def _returned(self) -> list[int]:
        return self.graph.outputs if not self.module.path else []

    def _results(self) -> tuple[int, ...]:
        if not self.module.path:
            return tuple(port.value for port in self.writer.stage.outputs)
        elsewhere = self._new_elsewhere()
        return tuple(
            value_id
            for item in self.items
            for value_id in self._makes(item)
            if value_id is not None
            and (
                value_id in elsewhere
                or not self.inside.issuperset(self.graph.values[value_id].users)
            )
        )

    def _new_elsewhere(self) -> set[int]:
        """Values that leave the stage, or replace what a buffer around this module holds."""
        inside: set[int] = set(self.updates.values())
        for item in self.items:
            if isinstance(item, Call):
                inside |= self._changes(item)
        replaced = set(self.graph.updates.values()) - inside
        return {*self.graph.outputs, *replaced}

    def _changes(self, call: Call) -> set[int]:
        """New contents that a called module keeps."""
        if call.layer is not None:
            own = set(call.layer.parameters.values())
            return {new for old, new in self.graph.updates.items() if old in own}
        calls = self.writer.calls
        found = set(calls.updates.get(call.module, {}).values())
        for item in calls.items.get(call.module, ()):
            if isinstance(item, Call):
                found |= self._changes(item)
        return found

    def _arguments(self) -> tuple[int, ...]:
        if not self.module.path:
            return tuple(port.value for port in self.writer.stage.inputs)
        made = {v for item in self.items for v in self._makes(item) if v is not None}
        read = [v for item in self.items for v in self.reads[id(item)]]
        read += [*self.updates.values()]
        return tuple(v for v in dict.fromkeys(read) if v not in made and v not in self.stored)

    def _buffer(self, value_id: int) -> Expression:
        homes = self.writer.calls.tree.homes[value_id]
        return self._reach(next(home for home in homes if self.module in home.module.upwards()))

    # --- steps ------------------------------------------------------------------------------

    def work(self) -> Work:
        """All of it, to be written."""
        self.wanted = self._names()
        needed = {*self.results, *self.updates.values()}
        for reads in self.reads.values():
            needed.update(reads)
        steps, calls = self._steps(needed), [self._module_call(item) for item in self.items]
        uses = Counter([*self.results, *self.updates.values()])
        for step in steps:
            uses.update(step.reads)
        loops = []
        for start, stop, carried in reversed(chains(calls, uses)):
            chain = [call for call in calls[start:stop] if call is not None]
            parent = self._container(self.items[start])
            siblings = [child.name for child in self.writer.construction.children(parent)]
            loops.append(as_loop(chain, carried, siblings))
            steps[start:stop] = [loops[-1]]
        return Work(
            steps=steps,
            arguments=self.arguments,
            results=self.results,
            updates=[(self._buffer(old), new) for old, new in self.updates.items()],
            stored=self.stored,
            names=self.wanted,
            pinned=frozenset(self.arguments[:1] if self._asks_for_device() else ()),
            taken=frozenset({"i", "self"} if loops else {"self"}) | {loop.item for loop in loops},
            large=self._large(),
            verbose=self.writer.verbose,
        )

    def _steps(self, needed: set[int]) -> list[Step | Loop]:
        return [
            self._operator(item, needed) if isinstance(item, IRNode) else self._call(item, needed)
            for item in self.items
        ]

    def _operator(self, node: IRNode, needed: set[int]) -> Step:
        one = is_marker(node.op) or signature(resolve(node.op)).returns_one
        device = self.arguments[:1] if SLOT in node.attrs.values() else ()
        return Step(
            reads=(*node.inputs, *device),
            makes=tuple(v if v in needed else None for v in node.results),
            write=lambda operands: self._spell(node, operands),
            is_tuple=not one,
            stays=keeps_its_place(node),
            typed=is_typed,
            source=node.source,
        )

    def _spell(self, node: IRNode, operands: Mapping[int, Expression]) -> Expression:
        if is_collective(node):
            return spell_collective(node, operands)
        mode = Mode(self.writer.program.training, device=self._device(operands))
        return spell(self.graph, node, operands, mode)

    def _call(self, call: Call, needed: set[int]) -> Step:
        callee = self.writer.construction.module(self.module, call.module)
        reads, makes = self.reads[id(call)], self._makes(call)
        source = self._source(call)
        return Step(
            reads=reads,
            makes=tuple(v if v in needed else None for v in makes),
            write=lambda operands: Expression(
                f"{callee}({', '.join(str(operands[v]) for v in reads)})"
            ),
            is_tuple=len(makes) > 1,
            stays=source is None or any(map(keeps_its_place, call.nodes)),
            typed=lambda expression: False,
            source=source,
        )

    def _module_call(self, item: Item) -> ModuleCall | None:
        """An item as a call of one of several modules that stand beside one another."""
        if not isinstance(item, Call) or is_plain(item.module.name):
            return None
        made, parent = self.made[item.module], self._container(item)
        if parent is self.module or self.writer.construction.made(parent).kind != "nn.ModuleDict":
            return None
        return ModuleCall(
            callee=self.writer.construction.module(self.module, item.module).text,
            arguments=self.reads[id(item)],
            results=tuple(v for v in self._makes(item) if v is not None),
            constructor=made.constructor,
            shape=self.writer.classes.shape(made.constructor),
            container=self.writer.construction.module(self.module, parent).text,
            key=item.module.name,
        )

    def _container(self, item: Item) -> Module:
        assert isinstance(item, Call)
        return item.module.parent or self.module

    def _large(self) -> frozenset[int]:
        """Values made here that are at least a quarter of the largest."""
        made = {v for item in self.items for v in self._makes(item) if v is not None}
        sizes = {value_id: self.graph.values[value_id].nbytes for value_id in made}
        most = max(sizes.values(), default=0)
        return frozenset(value_id for value_id, size in sizes.items() if 4 * size >= most)

    # --- names and devices --------------------------------------------------------------------

    def _names(self) -> dict[int, str]:
        acts = [self._act(item) for item in self.items]
        outward = [*self.results, *self.updates.values()]
        names = wanted_names(self.graph, acts, self.arguments, outward)
        for value_id in self.arguments:
            if self.graph.values[value_id].is_stored:
                names[value_id] = self._stored_name(value_id)
        if not self.module.path:
            for port in self.writer.stage.inputs:
                if port.name in self.writer.program.inputs:
                    names[port.value] = identifier(port.name)
        return names

    def _act(self, item: Item) -> Act:
        makes = tuple(v for v in self._makes(item) if v is not None)
        if isinstance(item, IRNode):
            return Act(tuple(item.inputs), makes, item.source)
        made = self.made[item.module]
        named = is_plain(item.module.name) and len(makes) == 1
        gives = (item.module.name,) if named else made.gives
        return Act(self.reads[id(item)], makes, self._source(item), made.takes, gives)

    def _source(self, call: Call) -> Source | None:
        """Where a module is called, as far as it is known."""
        if call.layer is not None:
            return call.nodes[0].source
        if call.module.parent is self.module:
            return call_site(self.module.cls, call.module.name)
        return None

    def _stored_name(self, value_id: int) -> str:
        """The name of a parameter that is an argument: its module's and its own."""
        home = self.writer.calls.tree.homes[value_id][0]
        module = home.module.name
        return identifier(f"{module}_{home.name}" if is_plain(module) else home.name)

    def _asks_for_device(self) -> bool:
        nodes = (item for item in self.items if isinstance(item, IRNode))
        return any(SLOT in node.attrs.values() for node in nodes)

    def _device(self, operands: Mapping[int, Expression]) -> str | None:
        """An expression for the device that the module runs on: that of its first argument."""
        if self.arguments and self.arguments[0] in operands:
            return f"{operands[self.arguments[0]]}.device"
        if self.stored:
            return f"{next(iter(self.stored.values()))}.device"
        return None
