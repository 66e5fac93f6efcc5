"""The specification's names lead to what this package's own names lead to."""

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.compat.specified import (
    CudaExecutor,
    compile_cuda,
    lower_ir_cuda,
    make_exec_plan_cuda,
    optimize_ir,
    optimize_plan,
)
from shardwright.compiler.lowering import lower_graph
from shardwright.errors import DeviceError
from shardwright.tracing import Model


def model() -> tuple[Model, nn.Module]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    made = Model("mlp")
    made.input("x", (4, 6))
    for layer in layers:
        made.add(layer)
    return made, layers


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected.detach(), rtol=1e-5, atol=1e-6)


def test_step_by_step() -> None:
    made, layers = model()
    graph = optimize_ir(made.finish(), "cpu")
    plan = optimize_plan(make_exec_plan_cuda(graph, lower_ir_cuda(graph)))
    weights = {value.name: graph.tensors[value.id] for value in graph.stored()}
    x = torch.randn(4, 6)
    (y,) = CudaExecutor(plan).run({"x": x, **weights})
    assert close(y, layers(x))


def test_names_of_the_package_itself() -> None:
    names = (compile_cuda, optimize_ir, CudaExecutor, lower_graph)
    assert (sw.compile_cuda, sw.optimize_ir, sw.CudaExecutor, sw.lower_graph) == names


def test_at_once() -> None:
    made, layers = model()
    x = torch.randn(4, 6)
    program = compile_cuda(made, device="cpu")
    assert close(program(x), layers(x))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA devices refuses")
def test_a_gpu_is_asked_for_by_default() -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        compile_cuda(model()[0])
