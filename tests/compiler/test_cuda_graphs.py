"""Replays as CUDA graphs: what holds of replays on the CPU holds there too."""

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.compiler.cuda_graphs import GraphMemory
from shardwright.compiler.replay import Replaying
from shardwright.errors import DeviceError
from tests.compiler.steps import OPTIMIZERS, Program, batches, network, program

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA devices refuses")
def test_without_a_gpu_there_is_one_clear_error() -> None:
    with pytest.raises(DeviceError, match="no CUDA device; compile it for the cpu"):
        GraphMemory(torch.device("cuda", 0))


def on_gpu(name: str, dropout: float = 0.0) -> Program:
    """A program on the GPU whose optimizer counts its steps there."""

    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        made = OPTIMIZERS[name](parameters)
        for group in made.param_groups:
            group["fused"], group["foreach"] = True, None
        return made

    return program(optimizer, lambda: network(dropout=dropout).cuda())


def data(count: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(x.cuda(), y.cuda()) for x, y in batches(count, rows)]


@pytest.mark.gpu
@needs_gpu
def test_a_model() -> None:
    torch.manual_seed(0)
    model = network().eval().cuda()
    x = torch.randn(8, 6, device="cuda")
    run = sw.compile(model, x)
    for rows in (8, 3, 8):
        x = torch.randn(rows, 6, device="cuda")
        assert torch.allclose(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert run.captures == 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_steps(name: str) -> None:
    made, eager = on_gpu(name), on_gpu(name)
    run = sw.compile(made.step, *data(1)[0])
    for x, y in data(10):
        assert torch.allclose(run(x, y), eager.step(x, y), rtol=1e-3)
    for key, tensor in made.state().items():
        assert torch.allclose(tensor.cpu(), eager.state()[key].cpu(), rtol=1e-2, atol=1e-4), key


@pytest.mark.gpu
@needs_gpu
def test_warming_up_and_recording_change_nothing() -> None:
    made = on_gpu("adamw", dropout=0.5)
    made.step(*data(1)[0])
    before, rng = made.state(), torch.cuda.get_rng_state()
    sw.compile(made.step, *data(1)[0], replay=Replaying("train", warm_up=3))
    assert all(torch.equal(tensor, before[key]) for key, tensor in made.state().items())
    assert torch.equal(torch.cuda.get_rng_state(), rng)


@pytest.mark.gpu
@needs_gpu
def test_dropout_differs_at_each_replay_and_the_step_advances() -> None:
    made = on_gpu("adamw", dropout=0.5)
    for group in made.optimizer.param_groups:
        group["lr"] = 0.0
    run = sw.compile(made.step, *data(1)[0])
    x, y = data(1)[0]
    assert len({run(x, y).item() for _ in range(4)}) == 4
    steps = {state["step"].item() for state in made.optimizer.state.values()}
    assert steps == {4.0}


@pytest.mark.gpu
@needs_gpu
def test_a_rate_that_changes_is_seen() -> None:
    made = on_gpu("momentum")
    run = sw.compile(made.step, *data(1)[0])
    x, y = data(1)[0]
    for group in made.optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in made.model.parameters()]
    run(x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


@pytest.mark.gpu
@needs_gpu
def test_results_are_copies() -> None:
    model = nn.Linear(6, 2).cuda()
    run = sw.compile(model, torch.randn(4, 6, device="cuda"))
    first = run(torch.ones(4, 6, device="cuda"))
    kept = first.clone()
    run(torch.zeros(4, 6, device="cuda"))
    assert torch.equal(first, kept)
