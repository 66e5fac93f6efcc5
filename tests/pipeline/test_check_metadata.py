"""One wrong thing at a time in metadata: slices, originals, the structure of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.structure import (
    Arguments,
    DictTree,
    Fixed,
    Leaf,
    ListTree,
    ObjectTree,
    Parameter,
    Tree,
    TupleTree,
)
from shardwright.pipeline import Document, MetadataTensor, Training, check
from shardwright.pipeline.check_tensors import count_cells
from shardwright.pipeline.schema import BatchRows
from tests.pipeline.documents import (
    COLLECTIVES,
    Broken,
    cases,
    constant,
    prove_broken,
    put,
    tensor,
    two_stages,
    whole,
    with_state,
)


def piece(side: str, name: str, **fields: Any) -> Callable[[Document], None]:
    """A change of a slice."""
    return lambda d: put(**fields)(getattr(d.metadata.tensor_slices, side)[name])


def original(side: str, name: str, **fields: Any) -> Callable[[Document], None]:
    """A change of an original tensor."""
    return lambda d: put(**fields)(getattr(d.metadata.tensors, side)[name])


def rows(inputs: tuple[str, ...], **outputs: int) -> Callable[[Document], None]:
    """A batch of these inputs, whose rows outputs have along these dimensions."""
    return lambda d: put(rows=(BatchRows(inputs, outputs),))(d.metadata)


def with_a_number() -> Document:
    """A document whose original has an input without dimensions, which nothing reads."""
    document = two_stages()
    document.metadata.tensors.inputs["n"] = MetadataTensor((), "f32", 1)
    document.metadata.structure = None
    return document


def uncovered_part(document: Document) -> None:
    document.metadata.tensors.outputs["output"].shape = (4, 3)


METADATA = cases(
    Broken(
        "an input without",
        "slices",
        lambda d: d.metadata.tensor_slices.inputs.clear(),
        "input",
        "x",
    ),
    Broken(
        "an output without",
        "slices",
        lambda d: d.metadata.tensor_slices.outputs.clear(),
        "output",
        "y",
    ),
    Broken(
        "one that is no input",
        "slices",
        lambda d: d.metadata.tensor_slices.inputs.update(h1=whole("x", "d0", 4, 8)),
        tensor="h1",
    ),
    Broken(
        "one that is no output",
        "slices",
        lambda d: d.metadata.tensor_slices.outputs.update(h1=whole("output", "d0", 4, 8)),
        tensor="h1",
    ),
    Broken("an unknown origin", "origin", piece("inputs", "x", origin="q"), tensor="x"),
    Broken("an input's origin", "origin", piece("outputs", "y", origin="x"), tensor="y"),
    Broken("the slice's", "slice-dtype", piece("inputs", "x", dtype="f16"), tensor="x"),
    Broken("the origin's", "slice-dtype", original("inputs", "x", dtype="c64"), tensor="x"),
    Broken("the tensor's", "slice-dtype", tensor("x", dtype="f16"), tensor="x"),
    Broken("too few ranges", "placements", piece("inputs", "x", placements=()), tensor="x"),
    Broken(
        "another size than the tensor",
        "placements",
        piece("inputs", "x", placements=((0, 4), (0, 9))),
        tensor="x",
    ),
    Broken(
        "beyond the origin",
        "placements",
        piece("inputs", "x", placements=((1, 5), (0, 8))),
        tensor="x",
    ),
    Broken(
        "an origin of other dimensions",
        "placements",
        original("inputs", "x", shape=(32,)),
        tensor="x",
    ),
    Broken("unknown", "device-known", piece("inputs", "x", device="d9"), tensor="x"),
    Broken("not the user's", "one-device", piece("inputs", "x", device="d1"), "d0.0", "x"),
    Broken("not the producer's", "slice-device", piece("outputs", "y", device="d0"), tensor="y"),
    Broken("not from 0", "idx", original("inputs", "x", idx=1), tensor="x"),
    Broken(
        "twice",
        "idx",
        lambda d: d.metadata.tensors.inputs.update(z=MetadataTensor((1,), "f32", 0)),
        tensor="z",
    ),
    Broken("outputs not from 0", "idx", original("outputs", "output", idx=7), tensor="output"),
    Broken(
        "without any slice",
        "outputs-covered",
        lambda d: d.metadata.tensors.outputs.update(extra=MetadataTensor((1,), "f32", 1)),
        tensor="extra",
    ),
    Broken("in part", "outputs-covered", uncovered_part, tensor="output"),
    Broken("of an unknown input", "rows", rows(("z",)), tensor="z"),
    Broken("of an unknown output", "rows", rows(("x",), x=0), tensor="x"),
    Broken("of no input", "rows", rows(())),
    Broken("of a number", "rows", rows(("n",)), base=with_a_number),
    Broken("of inputs of other lengths", "rows", rows(("x", "n")), base=with_a_number),
    Broken("beyond an output", "rows", rows(("x",), output=2), tensor="output"),
    Broken("not as long as an output", "rows", rows(("x",), output=1), tensor="output"),
    Broken(
        "an unknown constant",
        "tensor-known",
        lambda d: setattr(d, "training", Training({"h1": "q"})),
        tensor="q",
    ),
    Broken(
        "an unknown value",
        "tensor-known",
        lambda d: setattr(d, "training", Training({"q": "w1"})),
        tensor="q",
    ),
    Broken(
        "one constant twice",
        "replaces",
        lambda d: d.training.replaces.update(h2="state"),
        tensor="h2",
        base=with_state,
    ),
    Broken(
        "what is no constant",
        "replaces",
        lambda d: setattr(d, "training", Training({"h1": "h2"})),
        tensor="h1",
    ),
    Broken(
        "by an input",
        "replaces",
        lambda d: setattr(d, "training", Training({"x": "state"})),
        tensor="x",
        base=with_state,
    ),
    Broken(
        "by a constant",
        "replaces",
        lambda d: setattr(d, "training", Training({"w2": "w1"})),
        tensor="w2",
    ),
    Broken(
        "by another shape",
        "replaces",
        lambda d: setattr(d, "training", Training({"h1": "w1"})),
        tensor="h1",
    ),
    Broken(
        "on another device",
        "replaces",
        lambda d: setattr(d, "training", Training({"h2@d1": "state"})),
        tensor="h2@d1",
        base=with_state,
    ),
)


def test_the_hole_is_named() -> None:
    error = prove_broken(Broken("", "outputs-covered", uncovered_part, tensor="output"))
    assert "no pipeline output holds the part [0, 4), [2, 3) of this output" in str(error)


def test_an_input_of_the_original_may_be_unused() -> None:
    document = two_stages()
    document.metadata.structure = None
    document.metadata.tensors.inputs["mask"] = MetadataTensor((4,), "bool", 1)
    check(document)


def test_outputs_may_be_put_together_from_slices_that_overlap() -> None:
    document = COLLECTIVES["reduce_scatter"]()
    outputs = document.metadata.tensors.outputs
    outputs.clear()
    outputs["y"] = MetadataTensor((4, 5), "f32", 0)
    for i, start in enumerate((0, 3, 1)):
        slices = document.metadata.tensor_slices.outputs[f"y{i}"]
        slices.origin, slices.placements = "y", ((0, 4), (start, start + 2))
    check(document)
    document.metadata.tensor_slices.outputs["y2"].placements = ((0, 4), (0, 2))
    with pytest.raises(Exception, match=r"\[0, 4\), \[2, 3\)"):
        check(document)


def test_constants_may_be_named_as_outputs_are() -> None:
    document = two_stages()
    document.tensors["output"] = document.tensors.pop("w3")
    document.supertasks["d1.0"].inputs = ("h2@d1", "output")
    check(document)
    assert document.tensors["output"] == constant("head.weight", 2, 8)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    ranges = st.tuples(
        *(
            st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda r: tuple(sorted(r)))
            for size in shape
        )
    )
    return shape, draw(st.lists(ranges, max_size=6))


@given(boxes())
def test_cells_are_counted_as_painting_shows(
    drawn: tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]],
) -> None:
    shape, parts = drawn
    painted = torch.zeros(shape, dtype=torch.int64)
    for part in parts:
        painted[tuple(slice(start, end) for start, end in part)] += 1
    counted = torch.full(shape, -1)
    for cell, count in (count_cells(parts, shape) or {}).items():
        counted[tuple(slice(start, end) for start, end in cell)] = count
    assert torch.equal(counted, painted)


X, Y = Leaf("x", 0), Leaf("output", 0)


def inputs(*parameters: Parameter) -> Any:
    def change(document: Document) -> None:
        assert document.metadata.structure is not None
        document.metadata.structure.inputs = Arguments(parameters)

    return change


def argument(value: Tree, kind: str = "POSITIONAL_OR_KEYWORD", name: str = "x") -> Any:
    return inputs(Parameter(name, kind, value))


def outputs(tree: Tree) -> Any:
    def change(document: Document) -> None:
        assert document.metadata.structure is not None
        document.metadata.structure.outputs = tree

    return change


STRUCTURE = cases(
    Broken("an input without leaf", "structure", argument(Fixed(None)), tensor="x"),
    Broken("an output without leaf", "structure", outputs(TupleTree(())), tensor="output"),
    Broken("a leaf of no input", "structure", argument(Leaf("z", 0)), tensor="z"),
    Broken("a leaf of no output", "structure", outputs(Leaf("x", 0)), tensor="x"),
    Broken("another index", "structure", outputs(Leaf("output", 1)), tensor="output"),
    Broken("a leaf twice", "structure", argument(ListTree((X, X))), tensor="x"),
    Broken("an unknown kind of parameter", "structure", argument(X, "ANYTHING")),
    Broken("a parameter that is no name", "structure", argument(X, name="1x")),
    Broken(
        "parameters out of order",
        "structure",
        inputs(
            Parameter("k", "KEYWORD_ONLY", Fixed(1)), Parameter("x", "POSITIONAL_OR_KEYWORD", X)
        ),
    ),
    Broken(
        "a parameter twice",
        "structure",
        inputs(Parameter("x", "KEYWORD_ONLY", X), Parameter("x", "KEYWORD_ONLY", Fixed(1))),
    ),
    Broken("*args that are no tuple", "structure", argument(X, "VAR_POSITIONAL")),
    Broken("**kwargs that are no dict", "structure", argument(X, "VAR_KEYWORD")),
    Broken(
        "**kwargs with a number for a key",
        "structure",
        argument(DictTree((1,), (X,)), "VAR_KEYWORD"),
    ),
    Broken("a key without an item", "structure", argument(DictTree(("a", "b"), (X,)))),
    Broken("a key twice", "structure", argument(DictTree(("a", "a"), (X, Fixed())))),
    Broken("a field without an item", "structure", outputs(ObjectTree("m:C", ("a", "b"), (Y,)))),
    Broken("a class without module", "structure", outputs(ObjectTree("C", ("a",), (Y,)))),
    Broken("a wrong tree inside", "structure", outputs(ListTree((DictTree((), (Y,)),)))),
)


def test_every_kind_of_parameter_and_of_tree() -> None:
    document = two_stages()
    names = [f"x{i}" for i in range(4)]
    for i, name in enumerate(names, 1):
        document.metadata.tensors.inputs[name] = MetadataTensor((1,), "f32", i)
    first, second, third, fourth = (Leaf(name, i) for i, name in enumerate(names, 1))
    inputs(
        Parameter("x", "POSITIONAL_ONLY", X),
        Parameter("a", "POSITIONAL_OR_KEYWORD", ListTree((first, Fixed(None), Fixed("text")))),
        Parameter("rest", "VAR_POSITIONAL", TupleTree((second, Fixed(2)))),
        Parameter("k", "KEYWORD_ONLY", ObjectTree("module:Class.Inner", ("field",), (third,))),
        Parameter("absent", "KEYWORD_ONLY"),
        Parameter("more", "VAR_KEYWORD", DictTree(("q",), (DictTree((1, None), (fourth, X)),))),
    )(document)
    with pytest.raises(Exception, match="leaf twice"):
        check(document)
    assert document.metadata.structure is not None
    *others, _ = document.metadata.structure.inputs.parameters
    inputs(*others, Parameter("more", "VAR_KEYWORD", DictTree(("q",), (fourth,))))(document)
    check(document)


@pytest.mark.parametrize("case", [*METADATA, *STRUCTURE])
def test_broken(case: Broken) -> None:
    prove_broken(case)
