"""Every row of the catalog, split in every way, run in parts and put together again."""

import itertools

import pytest
import torch

from shardwright.dimops.catalog import ROWS, dimop_of
from shardwright.ir import compile_graph, resolve
from tests.dimops.calls import CASES
from tests.dimops.splitting import check, gradients

UNDEFINED = {f"aten.{name}" for name in ("empty_like.default", "empty.memory_format", "new_empty.default")}
IDS = [f"{i}-{case.op.removeprefix('aten.')}" for i, case in enumerate(CASES)]


def whole_of(graph, tensors):
    outputs = compile_graph(graph)(tensors)
    return tensors, outputs, gradients(outputs, tensors)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_parts_of_a_call_join_to_the_whole(case):
    graph, tensors = case.make()
    bound = dimop_of(graph, graph.nodes[-1])
    inputs, outputs, whole_gradients = whole_of(graph, tensors)
    if case.op in UNDEFINED:
        outputs = [torch.zeros_like(output) for output in outputs]
    for identifier in bound.identifiers:
        for num in (2, 3, 4):
            if num <= bound.lengths[identifier]:
                parts = bound.split(identifier, num)
                if case.op in UNDEFINED:
                    continue
                check(bound, parts, inputs, outputs, whole_gradients)


def test_every_row_has_a_case():
    ours = {op for op in ROWS if op.startswith("aten.")}
    assert ours == {case.op for case in CASES}


def test_every_row_names_an_operator():
    for op in ROWS:
        if op.startswith("aten."):
            resolve(op)
