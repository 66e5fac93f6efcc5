"""A generated file: header, imports, classes, and the function that makes them all.

Comes in: a Program. Goes out: the text of a Python file, not yet formatted. What always holds: the
text depends on the program alone; it has no date and no path in it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from shardwright.codegenerate.spelling import module_of
from shardwright.codegenerate.spelling.literals import described, quoted
from shardwright.codegenerate.splitting.pasting import pasted, taken_names
from shardwright.codegenerate.splitting.split_text import (
    by_slot,
    is_split,
    slices_table,
    support_names,
)
from shardwright.codegenerate.stage import Port, Program, Stage
from shardwright.codegenerate.support.slices import piece_of
from shardwright.codegenerate.writing.classes import Classes
from shardwright.codegenerate.writing.declarations import untold
from shardwright.codegenerate.writing.merging import merged
from shardwright.codegenerate.writing.writer import write_stage
from shardwright.errors import CodegenError
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

SHARE = '''\
def _share(stage: nn.Module, model: nn.Module) -> None:
    """Give a stage the parameters and buffers of the model: the very same, not copies."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    for path, module in stage.named_modules():
        for name in (*module._parameters, *module._buffers):
            if (own := getattr(module, name)) is None or not own.is_meta:
                continue  # what is not on meta is the stage's own
            key = f"{path}.{name}" if path else name
            if key not in tensors:
                raise ValueError(f"the model has no {key!r}; give the model that was partitioned")
            given = tensors[key]
            if (given.shape, given.dtype) != (own.shape, own.dtype):
                raise ValueError(
                    f"the model's {key!r} is {given.dtype}{list(given.shape)}, expected "
                    f"{own.dtype}{list(own.shape)}; give the model that was partitioned"
                )
            setattr(module, name, given)
'''

FOLLOW = '''\
def _follow(stage: nn.Module, model: nn.Module) -> None:
    """Put the modules of a stage in the modes of the model's."""
    modes = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    for path, module in stage.named_modules():
        module.training = modes.get(path, model.training)
'''

TIE = '''\
def _tie(stages: list[nn.Module]) -> None:
    """Give stages the parameters that earlier ones have under the same names."""
    known: dict[object, nn.Parameter] = {{}}
    for stage in stages:{pieces}
        for path, parameter in list(stage.named_parameters(remove_duplicate=False)):
            owner, _, name = path.rpartition(".")
            setattr(stage.get_submodule(owner), name, known.setdefault({key}, parameter))
'''

MOVE = '''\
def _move(stages: list[nn.Module], first: int = 0, step: int = 1) -> None:
    """Move stages to GPUs, each tensor once and in place, so that the model has it too."""
    moved = set()
    for number, stage in enumerate(stages):
        device = f"cuda:{(first + number * step) % torch.cuda.device_count()}"
        for tensor in (*stage.parameters(), *stage.buffers()):
            if id(tensor) not in moved:
                moved.add(id(tensor))
                tensor.data = tensor.data.to(device)
                if tensor.is_leaf and tensor.grad is not None:
                    tensor.grad.data = tensor.grad.data.to(device)
'''

WARN = '''\
def _warn_of_dropout(model: nn.Module) -> None:
    """Say that the model drops in training, and that what was captured in evaluation does not."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            warnings.warn(
                f"the model is in training mode and has dropout ({path}), but these stages have "
                "none: it was captured in evaluation; capture it in training mode",
                UserWarning,
                stacklevel=3,
            )
            return
'''

CONFIGURATION = '''\
def create_pipeline_configuration(
    model: nn.Module | None = None,
    debug: bool = False,
    partitions_only: bool = False,
    *,{options}
    DEBUG: bool = False,
) -> dict[str | int, Any]:
    """The partitions, with the names of what enters and leaves each, in order.

    They have the parameters and buffers of ``model``, not copies; without a model they have their
    own. Partition i is moved to ``cuda:i``, counted around where there are fewer devices, unless
    ``debug`` keeps all where they are; a tensor of several partitions goes to the first's device.
    ``partitions_only`` gives the modules alone, by number.
{slots}    """{needed}
    stages: dict[str | int, Any] = {{}}{begin}
    for number, partition in enumerate(({partitions})):
        if model is None:
            stage: nn.Module = {fresh}.train({training})
        else:
            with torch.device("meta"):
                stage = partition({given})
            {share}
            _follow(stage, model)
        stages[number] = stage{tie}
    if torch.cuda.is_available() and not (debug or DEBUG):
        _move({all_stages})
    if partitions_only:
        return stages
    return {{
        "model inputs": {inputs},
        "model outputs": {outputs},
        {configurations}
    }}
'''


CHECKED = """
    if model is not None and model.training:
        _warn_of_dropout(model)"""
"""Where the model was captured in evaluation."""

TIED = """
    if model is None:
        _tie([*stages.values()])"""
"""Where there are several partitions."""

NEEDED = """
    if model is None:
        raise ValueError(
            "give the model: no checkpoint has what this buffer holds, and it is too much for a "
            {name}
        )"""
"""Where there are buffers that only a model can fill."""

WHOLE = {
    "options": "",
    "slots": "",
    "all_stages": "[*stages.values()]",
    "begin": "",
    "given": "",
    "fresh": "partition()",
    "share": "_share(stage, model)",
}
SPLIT = {
    "options": """
    group: dist.ProcessGroup | None = None,
    slot: int | None = None,""",
    "all_stages": "[*stages.values()], place, COUNT",
    "slots": """
    The work of a partition is split over COUNT slots, of which each process is one: ``slot``, by
    default its rank in ``group``, the processes of these slots. Its partitions have slices of the
    model's parameters, with memory of their own; a port ``x[0:2, 0:8]`` is a slice of ``x``: where
    the batch is split, a process gives its own rows, and the loss is the sum of all slots' losses.
    Without a model parameters are NaN until ``load_state_dict`` fills them.
""",
    "begin": """
    place = slot_of(COUNT, group, slot)
    made: dict[object, Tensor] = {}""",
    "given": "group, place",
    "fresh": "unfilled(partition, group, place)",
    "share": "share(stage, model, made)",
}
"""What the function has where partitions are split over slots, and where they are not."""


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
        *(one.text.text(one.name) for one in merged(classes.defined(), classes.reserved)),
        *_functions(program),
        _configuration(program, names),
    ]
    return "\n\n".join(parts)


def _functions(program: Program) -> Iterator[str]:
    """What the function that makes the partitions calls."""
    split = is_split(program.partitions[0][0])
    if not split:
        yield SHARE
    yield FOLLOW
    if program.partitions[1:]:
        pieces = "\n        pieces = stage.pieces() if isinstance(stage, SplitStage) else {}"
        key = "pieces.get(path, path)" if split else "path"
        yield TIE.format(pieces=pieces if split else "", key=key)
    yield MOVE
    if not program.training:
        yield WARN


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


def _configuration(program: Program, names: list[list[str]]) -> str:
    entries = [
        f'{number}: {{"inputs": {by_slot([_list(stage.inputs) for stage in partition])}, '
        f'"outputs": {by_slot([_list(stage.outputs) for stage in partition])}, '
        f'"model": stages[{number}]}},'
        for number, partition in enumerate(program.partitions)
    ]
    makers = [by_slot(slots) for slots in names]
    options = SPLIT if any(is_split(partition[0]) for partition in program.partitions) else WHOLE
    counts = sorted(set(map(len, program.partitions)))
    if counts[1:]:
        raise CodegenError(
            f"the plan splits some partitions over {counts[-1]} slots and others over {counts[0]}; "
            "code is written for partitions of equally many slots: plan with mesh="
        )
    only = untold(program)
    places = range(counts[0])
    return CONFIGURATION.format(
        needed="".join(
            [
                NEEDED.format(name=quoted(f"file: {only[0]}")) if only else "",
                "" if program.training else CHECKED,
            ]
        ),
        tie=TIED if program.partitions[1:] else "",
        partitions=", ".join(makers) if makers[1:] else f"{makers[0]},",
        training=program.training,
        inputs=by_slot([_quoted(_model_ports(program, i, program.inputs)) for i in places]),
        outputs=by_slot([_quoted(_model_ports(program, i, program.outputs)) for i in places]),
        configurations="\n        ".join(entries),
        **{key: text.replace("COUNT", str(counts[0])) for key, text in options.items()},
    )


def _model_ports(program: Program, slot: int, names: Iterable[str]) -> Iterator[str]:
    """The ports by which a slot has the model's inputs or outputs: the whole, or its slices."""
    stages = [partition[slot] for partition in program.partitions]
    ports = [port.name for stage in stages for port in (*stage.inputs, *stage.outputs)]
    found: dict[str, dict[str, None]] = {}
    for port in ports:
        found.setdefault(piece_of(port).name, {})[port] = None
    for name in names:
        yield from [name] if name in found.get(name, {}) else found.get(name, [name])


def _list(ports: tuple[Port, ...]) -> str:
    return _quoted(port.name for port in ports)


def _quoted(names: Iterable[str]) -> str:
    return f"[{', '.join(map(quoted, names))}]"
