"""A generated file: header, imports, classes, and the function that makes the stages.

A stage's forward does what its graph does, with tensors under the original's names. The text
depends on the program alone; it has no date and no path in it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardwright.codegenerate.spelling.forms import described
from shardwright.codegenerate.splitting.collectives import SLOTS, is_collective
from shardwright.codegenerate.splitting.text import (
    BASE,
    MODULE_PARAMETERS,
    STAGE_PARAMETERS,
    is_split,
    pasted,
    slices_field,
    slices_table,
    slots_expression,
    support_names,
    taken_names,
)
from shardwright.codegenerate.stages import Port, Stage, StageProgram
from shardwright.codegenerate.writing.calls import Calls, ModuleCall, calls_of
from shardwright.codegenerate.writing.classes import (
    MODULE,
    Classes,
    ClassText,
    backward_functions,
    forward_lines,
)
from shardwright.codegenerate.writing.configuration import configuration, functions
from shardwright.codegenerate.writing.construction import Construction, Made, sequential
from shardwright.codegenerate.writing.forward import ModuleForward
from shardwright.codegenerate.writing.modules import Module, model_names, module_tree
from shardwright.codegenerate.writing.names import class_stem
from shardwright.codegenerate.writing.statements import Body, write_body
from shardwright.errors import CodegenError
from shardwright.ir import WITH_BACKWARD, IRNode
from shardwright.ir.operators import is_built_in
from shardwright.ops import registered
from shardwright.torch_internals import registering_module
from shardwright.version import __version__

SEQUENTIAL = "torch.nn.modules.container.Sequential"


@dataclass(eq=False)
class _StageClassWriter:
    """Writes the classes of one stage."""

    program: StageProgram
    stage: Stage
    classes: Classes
    verbose: bool
    calls: Calls = field(init=False)
    construction: Construction = field(init=False)

    def __post_init__(self) -> None:
        self.graph = self.stage.graph
        tree = module_tree(self.graph, model_names(self.program))
        self.calls = calls_of(self.graph, tree, training=self.program.training)
        self.construction = Construction(self.stage, self.calls, self.module)
        self.left = {*self.graph.outputs, *self.graph.updates.values()}

    def write(self) -> str:
        """Define the classes of the stage; gives the name of its own."""
        return self.module(self.calls.tree.root).kind

    def module(self, module: Module) -> Made:
        """Define the class of a module that is called, or that holds what others use."""
        if module not in self.calls.items:
            return self._define(module, None, (), ())
        if module.cls == SEQUENTIAL and (found := self._sequential(module)) is not None:
            return found
        forward = ModuleForward(self.stage, self.calls, self.construction, module)
        steps = forward.steps(self.program, self.classes, verbose=self.verbose)
        return self._define(module, write_body(steps), forward.arguments, forward.results)

    def _define(
        self,
        module: Module,
        body: Body | None,
        arguments: tuple[int, ...],
        results: tuple[int, ...],
    ) -> Made:
        text = ClassText(
            stem=class_stem(module.cls, module.path) if module.path else self.stage.name,
            doc=_doc(module) if module.path else tuple(_stage_doc(self.program, self.stage)),
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
        calls = [item for item in self.calls.items[module] if isinstance(item, ModuleCall)]
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


IMPORTS = """\
import base64
import math
import warnings
import zlib
from collections import OrderedDict
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
"""
"""All that a file may need; those that nothing uses are left out when it is formatted."""


def file_text(program: StageProgram, *, verbose: bool = False) -> str:
    """The text of a program's file. Raises CodegenError where a partition cannot be written."""
    support, helpers = pasted(support_names(program)), pasted(functions(program))
    classes = Classes((*_class_names(program), *taken_names(), "create_pipeline_configuration"))
    names = [
        [_StageClassWriter(program, stage, classes, verbose).write() for stage in partition]
        for partition in program.partitions
    ]
    own = "".join(f"import {name}  # noqa: F401\n" for name in _modules(program))
    parts = [
        _header(program),
        IMPORTS
        + "".join(f"{line}\n" for line in sorted({*support.imports, *helpers.imports}))
        + own,
        *([support.text] if support.text else []),
        *(slices_table(partition) for partition in program.partitions if is_split(partition[0])),
        *backward_functions(classes),
        *classes.defined(),
        helpers.text,
        configuration(program, names),
    ]
    return "\n\n".join(parts)


def _class_names(program: StageProgram) -> list[str]:
    """The names that stages may have: of a split partition one a slot, too."""
    stages = [stage for partition in program.partitions for stage in partition]
    slots = [f"{stage.name}Slot{stage.index}" for stage in stages if is_split(stage)]
    return [*dict.fromkeys(stage.name for stage in stages), *slots]


# --- header ---------------------------------------------------------------------------------------


def _header(program: StageProgram) -> str:
    count = len(program.partitions)
    what = f"{program.name} in {count} partitions" if count > 1 else f"{program.name} as one module"
    lost = " In evaluation there is no dropout: `train()` does not bring it back."
    mode = "training" if program.training else "evaluation"
    lines = [
        f'"""{described(what)}, written by shardwright {__version__}.',
        "",
        "    stages = create_pipeline_configuration(model, partitions_only=True)",
        "",
        *_paragraph(
            "makes them of the model's own parameters; without a model, of new ones, which "
            "`load_state_dict` fills. Modules, parameters and buffers have the names that they "
            "have in the model, and so do checkpoints. A stage's arguments and results are those "
            "that `create_pipeline_configuration(model)` names, in that order."
        ),
        "",
        *_paragraph(
            f"The model was captured in {mode} mode, for the shapes of one example. "
            f"Comments name the line of the program that a statement came from."
            f"{'' if program.training else lost}"
        ),
    ]
    for note in program.notes:
        lines += ["", *_paragraph(described(note))]
    return "\n".join([*lines, '"""', "", MYPY, "from __future__ import annotations"])


MYPY = '# mypy: disable-error-code="no-any-return"'
"""To mypy the call of a module gives anything, which a forward may return."""


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False)


def _modules(program: StageProgram) -> list[str]:
    """Modules that register operators which torch does not bring. Raises CodegenError."""
    stages = (stage for partition in program.partitions for stage in partition)
    found = {node.op: None for stage in stages for node in stage.graph.nodes if "." in node.op}
    modules = set()
    for op in found:
        module = module_of(op)
        if module in ("", "__main__"):
            raise CodegenError(
                f"the operator {op!r} is registered by no module that a generated file could "
                "import; define it in a module, not in a script's own"
            )
        if module is not None:
            modules.add(module)
    return sorted(modules)


def module_of(op: str) -> str | None:
    """The module whose import registers the operator; None where torch brings it.

    An operator whose origin is not known is looked for under its namespace's name among the
    modules that are loaded; "" where there is none.
    """
    if op == WITH_BACKWARD or (is_built_in(op) and not op.startswith("shardwright.")):
        return None
    if (found := registered(op)) is not None:
        return found.module
    namespace, name, _ = op.split(".", 2)
    return registering_module(f"{namespace}::{name}") or (
        namespace if namespace in sys.modules else ""
    )


# --- stages ---------------------------------------------------------------------------------------


def _stage_doc(program: StageProgram, stage: Stage) -> Iterator[str]:
    number = [partition[0].name for partition in program.partitions].index(stage.name)
    of = f"Partition {number} of {program.name}" if program.partitions[1:] else program.name
    yield f'"""{described(of)}.'
    yield ""
    slot = f"Slot {stage.index}"
    titles = (f"{slot} takes", f"{slot} gives") if is_split(stage) else ("Takes", "Gives")
    for title, ports in zip(titles, (stage.inputs, stage.outputs), strict=True):
        yield from textwrap.wrap(
            f"{title} {', '.join(_port(stage, port) for port in ports) or 'nothing'}.",
            94,
            subsequent_indent="    ",
            break_long_words=False,
        )
    yield '"""'


def _port(stage: Stage, port: Port) -> str:
    value = stage.graph.values[port.value]
    return f"{described(port.name)} {value.dtype}[{', '.join(map(str, value.shape))}]"
