"""How a slot's constants change during a training step, as it follows from the file.

Comes in: a checked document and a slot's name. Goes out: `Replacements`, which say for each
constant that is replaced whether the program that makes its new contents leaves them in its memory,
or whether they are copied there at the end of the turn; and how accumulators become zero.

What always holds: a constant stays where it is in memory for as long as its slot lives, so that
whoever has it once has its contents always. Who reads the old contents by name reads them: no
program overwrites what a later supertask of its turn still reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.engine.agenda import is_training
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.rules import COMPUTE_KINDS
from shardwright.pipeline.schema import Document, Phase, TensorInfo

Group = tuple[Phase | None, int | None]
"""Phase and stage: supertasks of one slot that have both alike run in one turn."""


@dataclass(frozen=True, slots=True)
class Replacements:
    """What becomes of a slot's constants in a step; tensors and supertasks are named.

    written
        Every constant that is replaced, and its new contents.
    in_place
        Supertask to what it makes in the memory of one of its inputs: mostly a constant's new
        contents in the constant's, sometimes in two steps (`_carriers`).
    copied
        Phase and stage to new contents, and the constants they are copied to when the turn ends,
        if they are not there already.
    assigned
        Accumulators that their supertask takes for zeros in the first microbatch.
    zeroed
        Accumulators that are set to zero before a step.
    """

    written: dict[str, str] = field(default_factory=dict)
    in_place: dict[str, dict[str, str]] = field(default_factory=dict)
    copied: dict[Group, dict[str, str]] = field(default_factory=dict)
    assigned: frozenset[str] = frozenset()
    zeroed: tuple[str, ...] = ()


def replacements(
    document: Document, slot: str, connections: Connections | None = None
) -> Replacements:
    """The replacements of a slot in a training step; none where there is no training."""
    if not is_training(document):
        return Replacements()
    connections = connections or connect(document)
    assert document.training is not None
    written: dict[str, str] = {}
    in_place: dict[str, dict[str, str]] = {}
    copied: dict[Group, dict[str, str]] = {}
    accumulators: dict[str, bool] = {}
    for new, old in document.training.replaces.items():
        if connections.devices[new] != slot:
            continue
        written[old] = new
        (maker,) = connections.producers[new]
        carriers = _carriers(document, connections, maker, new, old)
        for task, made, place in carriers:
            in_place.setdefault(task, {})[made] = place
        if len(carriers) != 1:
            copied.setdefault(group_of(document, maker), {})[new] = old
        if is_accumulator(document, connections, new):
            accumulators[old] = bool(carriers) and _is_read_by_one(document, connections, old)
    assigned = frozenset(old for old, alone in accumulators.items() if alone)
    zeroed = tuple(old for old in accumulators if old not in assigned)
    return Replacements(written, in_place, copied, assigned, zeroed)


def group_of(document: Document, task: str) -> Group:
    """A supertask's phase and stage."""
    return document.supertasks[task].phase, document.supertasks[task].stage


def runs_once(document: Document, task: str) -> bool:
    """Whether a supertask of a training step runs once a step, not once a microbatch."""
    return document.supertasks[task].phase in ("prepare", "update")


def is_accumulator(document: Document, connections: Connections, new: str) -> bool:
    """Whether new contents are those of an accumulator, which is zero when a step begins."""
    assert document.training is not None
    old = document.training.replaces[new]
    (maker,) = connections.producers[new]
    return document.tensors[old].init is not None and not runs_once(document, maker)


_Carrier = tuple[str, str, str]
"""A supertask, what it makes, and the input in whose memory it may make it."""


def _carriers(
    document: Document, connections: Connections, maker: str, new: str, old: str
) -> list[_Carrier]:
    """The supertasks that carry old contents to the new ones, the last first; none if none may.

    Mostly that is ``maker``. Where a parameter is used twice, one supertask adds to its
    accumulator and another to what that one made.
    """
    if not _is_short_lived(document, connections, new):
        return []
    found: list[_Carrier] = []
    task: str | None = maker
    while task is not None and document.supertasks[task].kind in COMPUTE_KINDS:
        inputs = document.supertasks[task].inputs
        if inputs.count(old) == 1:
            found.append((task, new, old))
            return found if _reads_last(document, connections, task, old) else []
        between = _between(document, connections, task, old)
        if between is None:
            return []
        found.append((task, new, between))
        (task,), new = connections.producers[between], between
    return []


def _is_short_lived(document: Document, connections: Connections, new: str) -> bool:
    """Whether new contents are read only in their turn, where that comes once a microbatch."""
    (maker,) = connections.producers[new]
    group = group_of(document, maker)
    return runs_once(document, maker) or all(
        group_of(document, reader) == group or document.supertasks[reader].phase == "update"
        for reader in connections.users.get(new, ())
    )


def _reads_last(document: Document, connections: Connections, task: str, old: str) -> bool:
    """Whether no later supertask of the turn reads the old contents."""
    turn = group_of(document, task), document.supertasks[task].device
    users = connections.users[old]
    later = users[users.index(task) + 1 :]
    return turn not in ((group_of(document, one), document.supertasks[one].device) for one in later)


def _between(document: Document, connections: Connections, task: str, old: str) -> str | None:
    """The one input of ``task`` that may be what another supertask of the turn made of ``old``.

    None where several may: two accumulators would be taken to lie in one place.
    """
    group = group_of(document, task)
    found = []
    for name in document.supertasks[task].inputs:
        info, makers = document.tensors[name], connections.producers.get(name, [])
        if (
            _kind(info) == _kind(document.tensors[old])
            and not info.is_constant
            and connections.users[name] == [task]
            and makers
            and group_of(document, makers[0]) == group
            and _leads_to(document, connections, makers[0], old)
        ):
            found.append(name)
    return found[0] if len(found) == 1 else None


def _leads_to(document: Document, connections: Connections, task: str, old: str) -> bool:
    """Whether a supertask reads ``old``, or what may have been made of it, and none like it."""
    inputs = document.supertasks[task].inputs
    if old in inputs:
        kind = _kind(document.tensors[old])
        accumulators = (document.tensors[name] for name in inputs)
        return sum(info.init is not None and _kind(info) == kind for info in accumulators) == 1
    return _between(document, connections, task, old) is not None


def _kind(info: TensorInfo) -> object:
    return info.shape, info.dtype, info.strides


def _is_read_by_one(document: Document, connections: Connections, old: str) -> bool:
    """Whether a single supertask reads an accumulator before the update."""
    readers = {
        user for user in connections.users[old] if document.supertasks[user].phase != "update"
    }
    return len(readers) == 1


# --- microbatches ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a batch is cut.

    ``inputs`` and ``outputs`` are the pipeline's tensors of which there is one a microbatch, each
    with the dimension along which that of microbatch i lies further on; an output of a single
    microbatch may have none.
    """

    n: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int | None]

    @classmethod
    def of(cls, document: Document, connections: Connections | None = None) -> Microbatching:
        """How a document says it."""
        if not is_training(document):
            return cls(1, {}, {})
        assert document.training is not None
        assert document.training.microbatches is not None
        dims, slices = document.training.microbatches.dim, document.metadata.tensor_slices
        connections = connections or connect(document)
        inputs = {
            name: dims[piece.origin]
            for name, piece in slices.inputs.items()
            if piece.origin in dims
            and not all(runs_once(document, user) for user in connections.users.get(name, ()))
        }
        outputs = {
            name: dims.get(piece.origin)
            for name, piece in slices.outputs.items()
            if not runs_once(document, connections.producers[name][0])
        }
        return cls(document.training.microbatches.n, inputs, outputs)
