"""Calls of `with_backward` in generated code: the backward becomes a function of the file.

Comes in: a node, whose attribute ``backward`` is the text of a graph. Goes out: a call of the
pasted ``with_backward`` with a function's name, and that function, once for all calls of the same
text. What always holds: the function takes the gradients, then what is saved, and gives a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.codegenerate.spelling.forms import Mode
from shardwright.codegenerate.spelling.literals import listed, quoted
from shardwright.codegenerate.spelling.table import is_typed, spell
from shardwright.codegenerate.writing.body import write_body
from shardwright.codegenerate.writing.classes import Classes
from shardwright.codegenerate.writing.hints import Act, wanted_names
from shardwright.codegenerate.writing.names import PASTED
from shardwright.codegenerate.writing.step import Step, Work
from shardwright.ir import SLOT, Input, IRGraph, IRNode
from shardwright.ir.operators import resolve, signature
from shardwright.ir.with_backward import backward_graph


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
        yield f"    {line.text}"
    given = body.lines[-1].text.removeprefix("return ")
    yield f"    return ({given},)" if len(graph.outputs) == 1 else f"    return {given}"
    yield ""


def _work(graph: IRGraph) -> Work:
    acts = [Act(tuple(node.inputs), tuple(node.outputs)) for node in graph.nodes]
    names = wanted_names(graph, acts, graph.inputs, graph.outputs)
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
            typed=is_typed,
        )

    return Work(
        steps=[step(node) for node in graph.nodes],
        arguments=tuple(graph.inputs),
        results=tuple(graph.outputs),
        updates=[],
        stored={},
        names=names,
        pinned=frozenset([first]),
    )
