"""Whole convolutional networks, compiled: native calls from end to end, with eager's results."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.kernels.lowered import BY_ID
from tests.compiler.passes.test_channels_last import MODELS, images
from tests.compiler.passes.test_fold_norms import evaluated


def kinds(program: sw.CompiledProgram) -> set[str]:
    return {BY_ID[op.kind_id].name for op in program.plan.lowered.ops}


@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_eager(name: str) -> None:
    model, shape = MODELS[name]
    x = images(*shape)
    model = evaluated(model)
    found, expected = sw.compile(model, x)(x), model(x)
    assert found.stride() == expected.stride()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_residual_network_needs_no_operator_of_torch() -> None:
    model, shape = MODELS["residual blocks"]
    x = images(*shape)
    assert kinds(sw.compile(evaluated(model), x)) <= {"conv", "pool", "copy", "view"}
