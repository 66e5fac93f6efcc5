"""Real models, made tiny: every one of the zoo, by every way to split it, against eager.

Models are captured once a dtype. Splits change the order of additions and are held to rounding in
float64; a cut in stages changes nothing and is held to the last bit in float32. Some models compute
norms and positions in float32 whatever their dtype; they are held to float32's rounding.
"""

from functools import cache

import pytest
import torch

import shardwright as sw
from zoo.models import MODELS

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]

BY_NAME = {entry.name: entry for entry in MODELS}
NAMES = list(BY_NAME)
SINGLE_ONLY = ("mixtral",)
"""Models with an operator that knows no float64."""
POLICIES = ("data", "tensor", "sequence")
ON_PROCESSES = [
    ("gpt2", {"pipeline": 3}),
    ("t5", {"pipeline": 4}),
    ("bert", {"data": 2}),
    ("resnet", {"data": 2}),
    ("llama", {"sequence": 2}),
    ("qwen3", {"pipeline": 2, "tensor": 2}),
    ("mixtral", {"pipeline": 2, "tensor": 2}),
]
"""A sample that runs on worker processes, beside two stages and two tensor slots."""


@cache
def captured(name, dtype):
    """Model, keyword arguments and graph; floating-point tensors in ``dtype``."""
    model, args, kwargs = BY_NAME[name].make()
    assert args == ()
    kwargs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in kwargs.items()}
    model = model.to(dtype)
    return model, kwargs, sw.capture(model, (), kwargs, name=name)


def check(name, dtype, plan_of, *, tolerance, in_process=True):
    model, kwargs, graph = captured(name, dtype)
    pipeline = sw.build(graph, plan_of(graph))
    report = sw.verify(
        pipeline,
        model,
        (),
        kwargs,
        in_process=in_process,
        tolerance=tolerance,
        modules=BY_NAME[name].modules,
    )
    assert report.equal
    return pipeline


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_cut_in_stages_is_equal_to_the_last_bit(name, stages):
    pipeline = check(name, torch.float32, lambda g: sw.plan(g, stages), tolerance=0.0)
    stored = {info.value.name for info in pipeline.tensors.values() if info.value is not None}
    model, _, _ = captured(name, torch.float32)
    aliases = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), set()).add(path)
    assert all(len(names & stored) <= 1 for names in aliases.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_split_is_equal_up_to_rounding(name, policy, slots):
    dtype = torch.float32 if name in SINGLE_ONLY else torch.float64
    graph = captured(name, dtype)[2]
    double = all(value.dtype != "f32" for value in graph.values.values())
    tolerance = 1e-12 if double else 1e-5
    check(name, dtype, lambda g: sw.plan(g, slots, policy=policy), tolerance=tolerance)


def test_most_models_are_held_to_double_precision():
    graphs = [captured(name, torch.float64)[2] for name in NAMES if name not in SINGLE_ONLY]
    double = [all(value.dtype != "f32" for value in g.values.values()) for g in graphs]
    assert sum(double) >= 11


@pytest.mark.parametrize("name", NAMES)
def test_stages_of_splits_are_equal_up_to_rounding(name):
    mesh = {"pipeline": 2, "tensor": 2}
    check(name, torch.float32, lambda g: sw.plan(g, mesh=mesh), tolerance=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_split_in_single_precision_is_equal_up_to_rounding(name, policy):
    check(name, torch.float32, lambda g: sw.plan(g, 2, policy=policy), tolerance=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "policy", "tolerance"),
    [
        *((name, "pipeline", 0.0) for name in NAMES[::4]),
        *((name, "tensor", 1e-5) for name in NAMES[2::4]),
    ],
)
def test_worker_processes_give_the_same(name, policy, tolerance):
    check(
        name,
        torch.float32,
        lambda g: sw.plan(g, 2, policy=policy),
        tolerance=tolerance,
        in_process=False,
    )


@pytest.mark.processes
@pytest.mark.parametrize(("name", "mesh"), ON_PROCESSES, ids=str)
def test_worker_processes_give_the_same_on_other_meshes(name, mesh):
    tolerance = 0.0 if set(mesh) == {"pipeline"} else 1e-5
    check(
        name,
        torch.float32,
        lambda g: sw.plan(g, mesh=mesh),
        tolerance=tolerance,
        in_process=False,
    )
