"""A generated file: header, imports, classes, and the function that makes them all.

Comes in: a Program. Goes out: the text of a Python file, not yet formatted. What always holds: the
text depends on the program alone; it has no date and no path in it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

from shardwright.codegenerate.spelling.literals import described
from shardwright.codegenerate.splitting.pasting import pasted, taken_names
from shardwright.codegenerate.splitting.split_text import is_split, slices_table, support_names
from shardwright.codegenerate.stage import Port, Program, Stage
from shardwright.codegenerate.writing.backwards import backward_functions
from shardwright.codegenerate.writing.classes import Classes
from shardwright.codegenerate.writing.configuration import configuration, functions
from shardwright.codegenerate.writing.writer import write_stage
from shardwright.errors import CodegenError
from shardwright.ir import WITH_BACKWARD
from shardwright.ir.operators import is_built_in
from shardwright.ops import registered
from shardwright.torch_internals import registering_module
from shardwright.version import __version__

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


def file_text(program: Program, *, verbose: bool = False) -> str:
    """The text of a program's file. Raises CodegenError where a partition cannot be written."""
    support = pasted(support_names(program))
    classes = Classes((*_class_names(program), *taken_names(), "create_pipeline_configuration"))
    names = [
        [
            write_stage(program, stage, classes, tuple(_stage_doc(program, stage)), verbose=verbose)
            for stage in partition
        ]
        for partition in program.partitions
    ]
    own = "".join(f"import {name}  # noqa: F401\n" for name in _modules(program))
    parts = [
        _header(program),
        IMPORTS + "".join(f"{line}\n" for line in support.imports) + own,
        *([support.text] if support.text else []),
        *(slices_table(partition) for partition in program.partitions if is_split(partition[0])),
        *backward_functions(classes),
        *(one.text.text(one.name) for one in classes.defined()),
        *functions(program),
        configuration(program, names),
    ]
    return "\n\n".join(parts)


def _class_names(program: Program) -> list[str]:
    """The names that stages may have: of a split partition one a slot, too."""
    stages = [stage for partition in program.partitions for stage in partition]
    slots = [f"{stage.name}Slot{stage.index}" for stage in stages if is_split(stage)]
    return [*dict.fromkeys(stage.name for stage in stages), *slots]


# --- header ---------------------------------------------------------------------------------------


def _header(program: Program) -> str:
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
    return "\n".join([*lines, '"""', "", "from __future__ import annotations"])


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False)


def _modules(program: Program) -> list[str]:
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


def _stage_doc(program: Program, stage: Stage) -> Iterator[str]:
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
