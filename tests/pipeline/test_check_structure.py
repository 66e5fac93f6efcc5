"""One wrong thing at a time in metadata.structure."""

from __future__ import annotations

from typing import Any

import pytest

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
from shardwright.pipeline import Document, MetadataTensor, check
from tests.pipeline.documents import Broken, cases, prove_broken, two_stages

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


CASES = cases(
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


@pytest.mark.parametrize("case", CASES)
def test_broken(case: Broken) -> None:
    prove_broken(case)


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
