"""The classes of a generated file, equal ones once, and the functions that are backwards.

Comments do not count, since they only say where a text came from. A backward takes the gradients,
then what is saved, and gives a tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.codegenerate.spelling.forms import Mode, listed, quoted
from shardwright.codegenerate.spelling.table import spell
from shardwright.codegenerate.writing.names import (
    PASTED,
    RESERVED,
    NamedStep,
    identifier,
    unused_class,
    wanted_names,
)
from shardwright.codegenerate.writing.statements import (
    INDENT,
    Body,
    Comment,
    ForwardSteps,
    Step,
    write_body,
)
from shardwright.ir import SLOT, Input, IRGraph, IRNode
from shardwright.ir.operators import resolve, signature
from shardwright.ir.with_backward import backward_graph

MODULE = "nn.Module"
DICTIONARY = "nn.ModuleDict"


@dataclass(frozen=True, slots=True)
class ClassText:
    """A class without its name.

    stem
        The name it should have.
    base
        What it is derived from.
    doc
        Its docstring, a line each.
    fields
        Annotations in its body.
    parameters
        Of its constructor, with their types.
    init
        The statements of its constructor, behind ``super().__init__()``.
    forward
        The lines of its forward, the first its ``def``; empty where it has none.
    base_arguments
        What the constructor gives to that of the base.
    """

    stem: str
    doc: tuple[str, ...]
    fields: tuple[str, ...]
    parameters: tuple[str, ...]
    init: tuple[str, ...]
    forward: tuple[str, ...]
    base: str = MODULE
    base_arguments: str = ""

    @property
    def key(self) -> object:
        """What equal classes have in common."""
        lines = tuple(line for line in self.forward if not isinstance(line, Comment))
        made = (self.base_arguments, self.parameters, self.init)
        return self.stem, self.base, self.fields, made, lines

    def text(self, name: str) -> str:
        """The class under a name."""
        return "\n".join(self._lines(name)) + "\n"

    def _lines(self, name: str) -> Iterable[str]:
        yield f"class {name}({self.base}):"
        yield from (f"    {line}".rstrip() for line in self.doc)
        if self.doc:
            yield ""
        yield from (f"    {line}" for line in self.fields)
        if self.fields:
            yield ""
        if self.init or self.parameters:
            yield f"    def __init__({', '.join(('self', *self.parameters))}) -> None:"
            yield f"        super().__init__({self.base_arguments})"
            yield from (f"        {line}" for line in self.init)
            yield ""
        yield from (f"    {line}".rstrip() for line in self.forward)
        if not (self.doc or self.fields or self.init or self.parameters or self.forward):
            yield "    pass"


@dataclass
class Classes:
    """The classes of one file; ``reserved`` are names that they must not take.

    ``backwards`` are functions that forwards name, by what they are made of (`backwards`).
    """

    reserved: Sequence[str] = ()
    backwards: dict[str, str] = field(default_factory=dict)
    _known: dict[object, str] = field(default_factory=dict)
    _texts: list[str] = field(default_factory=list)
    _names: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = {*self.reserved, *RESERVED}

    def define(self, text: ClassText, name: str | None = None, slot: str | None = None) -> str:
        """The name of a class with this text: that of an equal one, or a new one.

        ``name`` is one of those reserved, for a class that stands by itself; ``slot`` is another,
        for a slot that does something else than those before it.
        """
        key = (name, text.key)
        if key not in self._known:
            own = slot if name in self._known.values() else name
            self._known[key] = own or unused_class(text.stem, self._names)
            self._texts.append(text.text(self._known[key]))
        return self._known[key]

    def backward(self, stem: str, text: str) -> str:
        """The name of the function with a text, made of ``stem`` where it is new."""
        if text not in self.backwards:
            bare = identifier(stem.rpartition(".")[2])
            self.backwards[text] = unused_class(f"{bare}_backward", self._names)
        return self.backwards[text]

    def defined(self) -> list[str]:
        """The text of each, after those that it uses."""
        return self._texts


def forward_lines(body: Body) -> tuple[str, ...]:
    """A forward as lines of a class."""
    arguments = ", ".join(("self", *(f"{name}: Tensor" for name in body.arguments)))
    first = f"def forward({arguments}) -> {result_type(len(body.results))}:"
    margin = " " * (INDENT - 4)
    return first, *(type(line)(f"{margin}{line}") for line in body.lines)


def result_type(count: int) -> str:
    """The type of so many results."""
    if not count:
        return "tuple[()]"
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def spell_with_backward(node: IRNode, operands: Mapping[int, str], classes: Classes) -> str:
    """The call of a node; its backward is defined among ``classes``."""

    def those(name: str) -> str:
        items: Sequence[Input] = node.attrs[name]
        return listed([str(operands[node.inputs[item.index]]) for item in items], brackets=True)

    attrs = node.attrs
    function = classes.backward(attrs["name"], attrs["failure"] or attrs["backward"])
    parts = [function, those("made"), those("inputs")]
    parts += [those("saved")] if attrs["saved"] else []
    parts += [] if attrs["fills"] else ["fills=False"]
    return f"{PASTED}({', '.join(parts)})"


def backward_functions(classes: Classes) -> Iterator[str]:
    """The functions that calls name."""
    for text, name in classes.backwards.items():
        if text.startswith("graph "):
            yield "\n".join(_function(name, backward_graph(text)))
        else:
            message = quoted(f"this backward could not be captured: {text}")
            yield (
                f"def {name}(*tensors: Tensor) -> tuple[Tensor, ...]:\n"
                f"    raise NotImplementedError({message})\n"
            )


def _function(name: str, graph: IRGraph) -> Iterator[str]:
    body = write_body(_work(graph))
    taken = ", ".join(f"{argument}: Tensor" for argument in body.arguments)
    yield f"def {name}({taken}) -> tuple[Tensor, ...]:"
    for line in body.lines[:-1]:
        yield f"    {line}"
    given = body.lines[-1].removeprefix("return ")
    yield f"    return ({given},)" if len(graph.outputs) == 1 else f"    return {given}"
    yield ""


def _work(graph: IRGraph) -> ForwardSteps:
    steps = [NamedStep(tuple(node.inputs), tuple(node.outputs)) for node in graph.nodes]
    names = wanted_names(graph, steps, graph.inputs, graph.outputs)
    first = graph.inputs[0]
    for value_id in graph.inputs:
        value = graph.values[value_id]
        names[value_id] = "gradient" if value.name.startswith("g") else "saved"

    def step(node: IRNode) -> Step:
        device = (first,) if SLOT in node.attrs.values() else ()
        return Step(
            reads=(*node.inputs, *device),
            makes=tuple(node.results),
            write=lambda operands: spell(
                graph,
                node,
                operands,
                Mode(
                    False,
                    in_module=False,
                    device=f"{operands[first]}.device" if first in operands else None,
                ),
            ),
            is_tuple=not signature(resolve(node.op)).returns_one,
        )

    return ForwardSteps(
        steps=[step(node) for node in graph.nodes],
        arguments=tuple(graph.inputs),
        results=tuple(graph.outputs),
        updates=[],
        stored={},
        names=names,
        pinned=frozenset([first]),
    )
