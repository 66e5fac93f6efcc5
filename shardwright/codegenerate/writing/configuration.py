"""The function of a generated file that makes its stages, from a template.

A stage gets the model's own parameters, or new ones where there is no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.codegenerate.spelling.forms import quoted
from shardwright.codegenerate.splitting.text import by_slot, is_split
from shardwright.codegenerate.stages import Port, StageProgram
from shardwright.codegenerate.support.slices import piece_of
from shardwright.codegenerate.writing.construction import untold
from shardwright.errors import CodegenError

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
            follow_modes(stage, model)
        stages[number] = stage{tie}
    if torch.cuda.is_available() and not (debug or DEBUG):
        move_to_gpus({all_stages})
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
        warn_of_dropout(model)"""
"""Where the model was captured in evaluation."""

TIED = """
    if model is None:
        tie_parameters([*stages.values()])"""
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
    "share": "share_tensors(stage, model)",
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


def functions(program: StageProgram) -> list[str]:
    """What the function that makes the partitions calls, of `codegenerate.support.configuration`.

    Slices of the model's tensors are shared by a function of those that split stages have.
    """
    return [
        *([] if is_split(program.partitions[0][0]) else ["share_tensors"]),
        "follow_modes",
        *(["tie_parameters"] if program.partitions[1:] else []),
        "move_to_gpus",
        *([] if program.training else ["warn_of_dropout"]),
    ]


def configuration(program: StageProgram, names: list[list[str]]) -> str:
    """The function that makes the partitions; ``names`` are their classes, one a slot.

    Raises CodegenError where partitions have differently many slots.
    """
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
        outputs=by_slot(
            [_quoted(_model_ports(program, i, sorted(program.outputs))) for i in places]
        ),
        configurations="\n        ".join(entries),
        **{key: text.replace("COUNT", str(counts[0])) for key, text in options.items()},
    )


def _model_ports(program: StageProgram, slot: int, names: Iterable[str]) -> Iterator[str]:
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
