"""The law of spelling over every distinct call of the zoo, in both modes.

A call that several models make, or a model in both modes, is tried with the first of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch

from shardwright.codegenerate.spelling.forms import Mode
from shardwright.codegenerate.spelling.table import spell
from shardwright.ir import IRGraph, IRNode, resolve
from shardwright.ir.operators import flatten_results, is_random, join_call, signature
from shardwright.ir.structure import flatten_call
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype
from shardwright.tracing import CaptureWarning, capture
from tests.codegenerate.checkers import assert_passes_mypy
from tests.codegenerate.spelling_samples import EveryCall, class_text, run_class

pytest.importorskip("transformers")

from tests.zoo.captures import SHALLOW, single
from zoo.models import BY_NAME

pytestmark = pytest.mark.zoo

CASES = [(name, training) for name in BY_NAME for training in (False, True)]

OWN_NAMES = {
    "aten._native_batch_norm_legit_functional.default",
    "shardwright.with_backward.default",
    "transformers.grouped_mm_fallback.default",
}
"""What is written by the overload's own name; batch norms in training are layers, and a custom
backward is a function of the file."""


class Calls:
    """The distinct calls of a graph that are not known, each with the text it is written as."""

    def __init__(self, graph: IRGraph, training: bool, known: Set[str]) -> None:
        self.graph = graph
        self.mode = Mode(training=training, device="self.place")
        distinct = {self._key(node): node for node in graph.nodes}
        new = {f"{key} {self.text(node)}": node for key, node in distinct.items()}
        self.keys = new.keys()
        self.nodes = [node for key, node in new.items() if key not in known]

    def _key(self, node: IRNode) -> str:
        values = [self.graph.values[i] for i in node.inputs]
        return repr((node.op, [(v.shape, v.dtype, v.strides) for v in values], node.attrs))

    def text(self, node: IRNode) -> str:
        letters = dict(zip(dict.fromkeys(node.inputs), ascii_lowercase, strict=False))
        return spell(self.graph, node, letters, self.mode)

    def as_class(self, name: str) -> str:
        return class_text(
            name,
            [
                (self.text(n), len(set(n.inputs)), signature(resolve(n.op)).returns_one)
                for n in self.nodes
            ],
        )


def every(calls: Calls) -> EveryCall:
    """Makes every distinct call, on tensors of its own."""
    counts = [len(set(node.inputs)) for node in calls.nodes]
    return EveryCall(run_class("Every", calls.as_class("Every")), counts)


@cache
def graph_of(name: str, training: bool) -> tuple[IRGraph, list[torch.Tensor]]:
    if not training:
        return single(name, SHALLOW).graph, single(name, SHALLOW).inputs
    model, args, kwargs = BY_NAME[name].make(layers=SHALLOW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # bloom's own backward
        graph = capture(model.train(), args, kwargs)
    assert graph.in_structure is not None
    return graph, flatten_call(graph.in_structure, args, kwargs)


@cache
def calls_of(name: str, training: bool) -> Calls:
    """The calls of a model that no case before it has; those are looked at for it."""
    before = CASES[: CASES.index((name, training))]
    known = set[str]().union(*(calls_of(*case).keys for case in before))
    return Calls(graph_of(name, training)[0], training, known)


def new_calls(name: str, training: bool) -> Calls:
    """As `calls_of`; the test is skipped where all calls are known."""
    calls = calls_of(name, training)
    if not calls.nodes:
        pytest.skip("models before it make all of its calls")
    return calls


each_case = pytest.mark.parametrize(
    ("name", "training"),
    CASES,
    ids=[f"{name}-{'train' if training else 'eval'}" for name, training in CASES],
)


def blank(calls: Calls) -> list[torch.Tensor]:
    """Tensors like the operands of all calls."""
    values = [calls.graph.values[i] for node in calls.nodes for i in dict.fromkeys(node.inputs)]
    made = []
    for value in values:
        strides = value.strides or contiguous_strides(value.shape)
        made.append(torch.empty_strided(value.shape, strides, dtype=torch_dtype(value.dtype)))
    return made


@pytest.mark.timeout(300)
@each_case
def test_every_call_captures_back(name: str, training: bool) -> None:
    calls = new_calls(name, training)
    again = capture(every(calls).train(training), [tensor.fill_(0) for tensor in blank(calls)])
    place = 0
    for node in calls.nodes:
        producer = again.values[again.outputs[place]].producer
        assert producer is not None, f"{calls.text(node)} is captured as nothing"
        found = again.node_by_id()[producer]
        assert (found.op, found.attrs) == (node.op, node.attrs), calls.text(node)
        first = again.inputs.index(found.inputs[0]) if found.inputs else 0
        order = [again.inputs.index(i) - first for i in found.inputs]
        distinct = list(dict.fromkeys(node.inputs))
        assert order == [distinct.index(i) for i in node.inputs], calls.text(node)
        place += len(node.results)
    assert place == len(again.outputs)


def compute(node: IRNode, operands: list[torch.Tensor]) -> list[Any]:
    """What a node gives."""
    args, kwargs = join_call(resolve(node.op), operands, node.attrs, "cpu")
    return flatten_results(resolve(node.op)(*args, **kwargs))


def walk(graph: IRGraph, given: list[torch.Tensor]) -> Iterator[tuple[IRNode, list[torch.Tensor]]]:
    """Run a graph node by node: each with what it reads, before it runs."""
    tensors = dict(graph.tensors) | dict(zip(graph.inputs, given, strict=True))
    for node in graph.nodes:
        operands = [tensors[i] for i in node.inputs]
        yield node, operands
        made = compute(node, operands)
        tensors |= dict(zip(node.outputs, (m for m in made if m is not None), strict=True))


@pytest.mark.timeout(300)
@each_case
def test_every_text_gives_what_the_node_gives(name: str, training: bool) -> None:
    graph, given = graph_of(name, training)
    calls = new_calls(name, training)
    module = run_class("Every", calls.as_class("Every"))().train(training)
    places = {node.id: k for k, node in enumerate(calls.nodes)}
    with torch.no_grad():
        for node, operands in walk(graph, given):
            if node.id not in places:
                continue
            distinct = dict(zip(node.inputs, operands, strict=True)).values()
            torch.manual_seed(0)
            expected = compute(node, operands)
            torch.manual_seed(0)
            found = flatten_results(getattr(module, f"call_{places[node.id]}")(*distinct))
            if "empty" in node.op:
                continue
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.nan_to_num(), other.nan_to_num()), calls.text(node)
            assert is_random(node) == (
                torch.Tag.nondeterministic_seeded in resolve(node.op).tags
                and node.attrs.get("dropout_p") != 0
            )


@pytest.mark.timeout(900)
def test_texts_are_typed_and_nothing_common_falls_back(tmp_path: Path) -> None:
    texts, by_overload = [], set()
    for name, training in CASES:
        calls = calls_of(name, training)
        if calls.nodes:
            texts.append(calls.as_class(f"{name.title()}{training}"))
        by_overload |= {node.op for node in calls.nodes if "torch.ops." in calls.text(node)}
    assert by_overload == OWN_NAMES
    file = tmp_path / "zoo.py"
    file.write_text("\n\n".join(texts))
    assert_passes_mypy([file])
