"""A stage as classes: each module with a forward, or that holds what others use, in turn.

Comes in: a stage. Goes out: its class, and those inside it, in `Classes`. What always holds: the
stage's forward does what its graph does, with tensors under the original's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardwright.codegenerate.spelling.literals import described
from shardwright.codegenerate.splitting.collectives import SLOTS, is_collective
from shardwright.codegenerate.splitting.split_text import (
    BASE,
    MODULE_PARAMETERS,
    STAGE_PARAMETERS,
    is_split,
    slices_field,
    slots_expression,
)
from shardwright.codegenerate.stage import Program, Stage
from shardwright.codegenerate.writing.body import Body, write_body
from shardwright.codegenerate.writing.calls import Calls, calls_of
from shardwright.codegenerate.writing.classes import MODULE, Classes, ClassText, forward_lines
from shardwright.codegenerate.writing.construction import Construction, Made
from shardwright.codegenerate.writing.containers import sequential
from shardwright.codegenerate.writing.flow import Flow
from shardwright.codegenerate.writing.forward import forward_work
from shardwright.codegenerate.writing.modules import Module, model_names, module_tree
from shardwright.codegenerate.writing.names import class_stem
from shardwright.codegenerate.writing.order import Call
from shardwright.ir import IRNode

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

    def write(self) -> Made:
        return self.module(self.root)

    def module(self, module: Module) -> Made:
        """Define the class of a module that is called, or that holds what others use."""
        if module not in self.calls.items:
            return self._define(module, None, (), ())
        if module.cls == SEQUENTIAL and (found := self._sequential(module)) is not None:
            return found
        flow = Flow(self.stage, self.calls, self.construction, module)
        work = forward_work(self.program, self.classes, flow, verbose=self.verbose)
        return self._define(module, write_body(work), flow.arguments, flow.results)

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
