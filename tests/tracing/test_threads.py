"""Captures disturb no other thread: neither each other nor a plain loop that trains meanwhile."""

import builtins
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import shardwright as sw
from shardwright.torch_internals import NO_GRAD_WRAPPER

X = torch.arange(32.0).view(4, 8) / 32


class Doubled(torch.autograd.Function):
    """The same, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class Net(nn.Module):
    """Layers whose call, attributes and kernels differ while torch.export is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8))
        self.conv = nn.Conv1d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(Doubled.apply(self.layers(x)).unsqueeze(1)).square().mean()


def plain_step() -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module]:
    """A step that asks everything of torch that a recorded one has replaced."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return step, model


def state_of_torch() -> list[Any]:
    """What other threads see of torch, and of Python."""
    return [
        nn.Module.__call__,
        nn.Module.__getattr__,
        nn.Module.zero_grad,
        nn.Module.register_parameter,
        torch.optim.Optimizer.zero_grad,
        torch.optim.AdamW.step,
        nn.utils.clip_grad_norm_.__closure__[0].cell_contents,  # type: ignore[attr-defined]
        list(optimizers._global_optimizer_pre_hooks),
        bool(torch.compiler.is_compiling()),
        bool(torch.compiler.is_exporting()),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.is_grad_enabled(),
        builtins.max,
        builtins.min,
    ]


@contextmanager
def meanwhile(program: Callable[[], Any]) -> Iterator[threading.Event]:
    """Run ``program`` in another thread, again and again, until the block ends."""
    failures: list[BaseException] = []
    going, done = threading.Event(), threading.Event()

    def run() -> None:
        try:
            while not done.is_set():
                program()
                going.set()
        except BaseException as error:
            failures.append(error)
            going.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield going
    finally:
        done.set()
        thread.join()
    assert failures == []


def losses(count: int = 5) -> list[torch.Tensor]:
    step, _ = plain_step()
    return [step(X) for _ in range(count)]


class Beside:
    """Another thread, which runs a program when a step calls `ask`, and keeps what it gives.

    It is asked through pipes: a step can then hold nothing of it that a recording puts back.
    """

    def __init__(self, program: Callable[[], Any]) -> None:
        self._results: list[Any] = []
        asked, self.asking = os.pipe()
        self.answered, answering = os.pipe()

        def run() -> None:
            os.read(asked, 1)
            self._results.append(program())
            os.write(answering, b"x")

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join()
        return self._results[0]


def asking(beside: Beside, step: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """A step in whose middle the other thread runs its program."""
    asking, answered = beside.asking, beside.answered

    def asks(x: torch.Tensor) -> Any:
        os.write(asking, b"x")
        os.read(answered, 1)
        return step(x)

    return asks


def test_nothing_that_another_thread_sees_changes_while_a_step_is_recorded() -> None:
    step, _ = plain_step()
    before, beside = state_of_torch(), Beside(state_of_torch)
    sw.compile_ir(asking(beside, step), X)
    assert beside.result() == before
    assert state_of_torch() == before


def test_an_unrelated_model_trains_while_a_step_is_recorded() -> None:
    expected, beside = losses(), Beside(losses)
    step, _ = plain_step()
    graph = sw.compile_ir(asking(beside, step), X)
    assert [node.op for node in graph.nodes if node.op.startswith("adam")] == ["adamw_step"]
    assert all(map(torch.equal, beside.result(), expected))


def test_captures_of_two_threads_while_a_third_trains() -> None:
    """Each gives what it gives alone, bit for bit."""
    steps = [plain_step()[0] for _ in range(4)]
    model = Net().eval()
    alone = [str(sw.compile_ir(steps[0], X)), str(sw.capture(model, (X,)))]
    expected = losses()

    def train() -> None:
        assert all(map(torch.equal, losses(), expected))

    with meanwhile(train) as going, ThreadPoolExecutor(2) as pool:
        going.wait()
        graphs = [pool.submit(sw.compile_ir, step, X) for step in steps]
        models = [pool.submit(sw.capture, model, (X,)) for _ in steps]
        assert {str(one.result()) for one in graphs} == {alone[0]}
        assert {str(one.result()) for one in models} == {alone[1]}


def test_a_model_is_captured_while_another_thread_captures_it() -> None:
    """The second begins in the middle of the first, while a parameter is somewhere else."""
    begun = threading.Event()

    class Moving(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parameters = self.layers[0]._parameters
            weight = parameters.pop("weight")
            begun.set()
            time.sleep(0.2)
            parameters["weight"] = weight
            return super().forward(x)

    model = Moving().eval()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sw.capture, model, (X,))
        assert begun.wait(10)
        second = pool.submit(sw.capture, model, (X,))
        assert str(first.result()) == str(second.result())


def test_an_evaluation_is_recorded_in_the_middle_of_a_run_while_another_model_trains() -> None:
    step, model = plain_step()
    expected = losses()

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    def train() -> None:
        assert all(map(torch.equal, losses(), expected))

    with meanwhile(train) as going:
        going.wait()
        result = sw.train(
            step,
            [X, X],
            mesh={"data": 1},
            epochs=1,
            evaluate=evaluate,
            eval_data=[X],
            in_process=True,
            quiet=True,
        )
    assert torch.allclose(torch.tensor(result.losses), torch.stack(expected[:2]), rtol=1e-5)


def test_models_of_other_threads_have_weights() -> None:
    made = []
    with sw.empty_weights():
        other = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert not made[0].weight.is_meta


def test_random_numbers_of_other_threads_go_on() -> None:
    beside = Beside(lambda: torch.rand(()))
    step, _ = plain_step()
    with meanwhile(lambda: time.sleep(0.01)):
        sw.compile_ir(asking(beside, step), X)
    assert not torch.equal(torch.rand(()), beside.result())


@pytest.mark.parametrize("function", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_functions_are_wrapped_as_they_are_looked_for(function: Any) -> None:
    assert function.__code__ is NO_GRAD_WRAPPER
    assert "func" in function.__code__.co_freevars
    assert not hasattr(function.__wrapped__, "__wrapped__")
