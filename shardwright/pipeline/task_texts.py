"""What the rules need to know of a compute supertask's data, whatever its kind.

Comes in: the data of a supertask, and its kind. Goes out: a `TaskText`. ``FX`` text is read here;
the reader of the lowered ``dfg`` is what `exec` supplies (`lazy.SUPPLIED`), in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.lazy import supplied
from shardwright.pipeline.fxtext import Made, parse
from shardwright.pipeline.proof import prove
from shardwright.pipeline.schema import DeviceKind, TensorInfo
from shardwright.pipeline.serialize import check_json


@dataclass(frozen=True, slots=True)
class TaskText:
    """A text, read and found to be one.

    inputs
        The names of its placeholders.
    results
        Each output as what is made, or as the position of the input that it is.
    operators
        The operators that it calls by name, each with the first node or call that does.
    prove
        Puts all of it to the test, with the tensors that a supertask binds, for a kind of slot.
        Raises GraphError.
    takes
        What each input must be, where the text says it.
    """

    inputs: tuple[str, ...]
    results: tuple[Made | int, ...]
    operators: Mapping[str, str]
    prove: Callable[[Sequence[TensorInfo], DeviceKind], None]
    takes: tuple[Made, ...] | None = None


Reader = Callable[[str], TaskText]
"""Reads a text. Raises GraphError where it is none of its kind."""


def _read_fx(data: str) -> TaskText:
    text = parse(data)
    operators = {node.op: node.name for node in reversed(text.nodes)}
    return TaskText(text.inputs, tuple(text.results()), operators, partial(prove, data))


def read_text(kind: str, data: str) -> TaskText:
    """The data of a compute supertask of this kind. Raises GraphError, PipelineError."""
    reader: Reader = _read_fx if kind == "FX" else supplied("reader of dfg")
    text = reader(data)
    check_json(data)
    return text
