"""Stages of split plans: their collectives and slices, before they are written."""

from __future__ import annotations

from typing import Any

import pytest

import shardwright as sw
from shardwright.codegenerate.codegen import program_of_plan
from shardwright.codegenerate.splitting.collectives import COLLECTIVES, StageHoldings, is_collective
from shardwright.codegenerate.stages import StageProgram
from shardwright.errors import CodegenError
from shardwright.ir.validate import validate
from tests.codegenerate import split_models


def program_of(name: str, **plan: Any) -> StageProgram:
    model, inputs = split_models.made(name)
    graph = sw.capture(model, inputs)
    return program_of_plan(graph, sw.plan(graph, **plan))


def collectives(program: StageProgram) -> list[list[list[tuple[str, Any]]]]:
    """By partition and slot."""
    return [
        [
            [(n.op, tuple(n.attrs.items())) for n in stage.graph.nodes if is_collective(n)]
            for stage in partition
        ]
        for partition in program.partitions
    ]


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {"devices": 2, "policy": "tensor"}),
    "tensor 4": (4, {"devices": 4, "policy": "tensor"}),
    "data 2": (2, {"devices": 2, "policy": "data"}),
    "sequence 2": (2, {"devices": 2, "policy": "sequence"}),
    "data 2 × tensor 2": (4, {"mesh": {"data": 2, "tensor": 2}}),
    "pipeline 2 × tensor 2": (2, {"mesh": {"pipeline": 2, "tensor": 2}}),
    "pipeline 2 × data 2": (2, {"mesh": {"pipeline": 2, "data": 2}}),
    "pipeline 2 × sequence 2": (2, {"mesh": {"pipeline": 2, "sequence": 2}}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["mlp", "decoder", "uneven"])
def test_slots_communicate_in_one_order(name: str, plan: str) -> None:
    program = program_of(name, **PLANS[plan][1])
    for partition in program.partitions:
        for stage in partition:
            validate(stage.graph)
            assert [port.name for port in stage.inputs] == sorted(p.name for p in stage.inputs)
            assert [port.name for port in stage.outputs] == sorted(p.name for p in stage.outputs)
    for slots in collectives(program):
        assert all(found == slots[0] for found in slots)
        assert {op for op, _ in slots[0]} <= COLLECTIVES.keys()
    assert any(found for slots in collectives(program) for found in slots)


def test_a_parameter_of_two_partitions_is_one_slice() -> None:
    program = program_of("tied", **PLANS["pipeline 2 × tensor 2"][1])
    for slot in (0, 1):
        first, last = (partition[slot].slices for partition in program.partitions)
        held = [first["first.2.weight"], last["first.2.weight"], last["last.2.weight"]]
        assert len({entry[1:] for entry in held}) == 1


def test_a_parameter_in_two_layouts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageHoldings, "_loaded_as", lambda *given: given[-1])
    with pytest.raises(CodegenError, match=r"Stage0 and Stage1 are tied by .*'first\.2\.weight'"):
        program_of("tied", **PLANS["pipeline 2 × tensor 2"][1])


@pytest.mark.parametrize("name", ["gated", "extreme"])
def test_no_gradient_goes_through_a_maximum_of_maxima(name: str) -> None:
    program = program_of(name, **PLANS["tensor 2"][1])
    found = {op for slots in collectives(program) for slot in slots for op, _ in slot}
    assert "all_gather" in found
    assert "all_reduce_extreme" not in found
