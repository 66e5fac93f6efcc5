"""Custom ``torch.autograd.Function``s keep their backward: trained, compiled and generated."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.autograd import Function

import shardwright as sw
from shardwright.errors import CaptureError, GraphError
from shardwright.ops.catalog import dimop_of
from tests.custom_functions import MODULES, Applied, Round, Scale, module
from tests.turns import rotated

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2)]
WAYS = ("one", "pipeline", "data", "tensor", "compiled")
"""One slot, two along an axis, or a compiled step."""


def stepper(model: Applied) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained(model: Applied, way: str) -> dict[str, torch.Tensor]:
    if way == "compiled":
        program = sw.compile(stepper(model), BATCHES[0])
        for batch in BATCHES:
            program(batch)
    else:
        mesh = {"data": 1} if way == "one" else {way: 2}
        sw.train(stepper(model), BATCHES, mesh=mesh, epochs=1, quiet=True, in_process=True)
    return model.state_dict()


@pytest.mark.parametrize(("name", "way"), rotated(list(MODULES), WAYS))
def test_a_function_keeps_its_backward(name: str, way: str) -> None:
    eager, ours = module(name).double(), module(name).double()
    for batch in BATCHES:
        stepper(eager)(batch)
    found = trained(ours, way)
    tolerance = 1e-2 if name == "autocast" else 1e-12
    for key, expected in eager.state_dict().items():
        assert torch.allclose(found[key], expected, rtol=tolerance, atol=tolerance), key


def from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", MODULES)
def test_generated_code_holds_the_backward(name: str, tmp_path: Path) -> None:
    x = BATCHES[0].float()
    eager, ours = module(name), module(name)
    eager(x).square().mean().backward()
    path = tmp_path / "generated.py"
    sw.pipe_model(ours, x, None, 2, 2, output_file=str(path))
    assert "shardwright." not in path.read_text().replace("written by shardwright", "")
    stages = from_file(path).create_pipeline_configuration(ours, DEBUG=True)
    values = {"x": x}
    for number in (0, 1):
        made = stages[number]["model"](*[values[name] for name in stages[number]["inputs"]])
        given = made if isinstance(made, tuple) else (made,)
        values |= dict(zip(stages[number]["outputs"], given, strict=True))
    given[0].square().mean().backward()
    for (key, expected), parameter in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert expected.grad is not None
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected.grad, rtol=1e-5, atol=1e-8), key


@pytest.mark.parametrize("name", MODULES)
def test_a_captured_model_computes_and_differentiates_as_it_does(name: str) -> None:
    x, model = BATCHES[0].float(), module(name).eval()
    graph = sw.capture(model, (x,))
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()), allow_unused=True)
    found = torch.autograd.grad(graph.run(x).sum(), list(model.parameters()), allow_unused=True)
    assert torch.equal(graph.run(x), model(x))
    assert torch.allclose(sw.compile(model, x)(x), model(x), atol=1e-6)
    assert torch.equal(
        sw.run(sw.build(graph, sw.plan(graph, devices=2)), x, in_process=True), model(x)
    )
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_trained_file_has_plain_operators_alone() -> None:
    graph = sw.compile_ir(stepper(module("gelu").double()), BATCHES[0])
    pipeline = sw.build(graph, sw.plan(graph, mesh={"pipeline": 2}))
    texts = [task.data or "" for task in pipeline.supertasks.values()]
    assert "shardwright." not in "".join([*texts, *(pipeline.blobs or {}).values()])


def test_an_elementwise_backward_is_cut_and_a_norm_is_not() -> None:
    def identifiers(name: str) -> int:
        graph = sw.compile_ir(stepper(module(name).double()), BATCHES[0])
        node = next(n for n in graph.nodes if "with_backward" in n.op)
        bound = dimop_of(graph, node)
        return len(bound.identifiers) if bound else 0

    found = {name: identifiers(name) for name in ("reversal", "softmax", "product")}
    assert found == {"reversal": 2, "softmax": 1, "product": 2}
    assert identifiers("clipping by norm") == 0


# --- what cannot be ------------------------------------------------------------------------------


def applied(backward: Callable[..., Any], forward: Callable[..., Any] = Round.forward) -> Applied:
    function: Any = type(
        "Own", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    torch.manual_seed(0)
    return Applied(lambda m, x: function.apply(x)).double()


def _by_contents(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2 if gradient.norm() > 1 else gradient


def _by_number(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient / gradient.norm().item()


def _by_autograd(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = gradient.detach().requires_grad_()
        (found,) = torch.autograd.grad(x.square().sum(), x)
    return found


def _wrong_shape(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient[:, :3]


def _too_many(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient, gradient


@pytest.mark.parametrize(
    "backward", [_by_contents, _by_number, _by_autograd, _wrong_shape, _too_many]
)
def test_a_backward_that_cannot_be_traced_is_an_error_in_training_alone(
    backward: Callable[..., Any],
) -> None:
    model = applied(backward)
    graph = sw.capture(model.eval(), (BATCHES[0],))
    assert torch.equal(graph.run(BATCHES[0]), model(BATCHES[0]))
    for way in ("pipeline", "data", "compiled"):
        with pytest.raises((GraphError, CaptureError), match=r"test_custom_functions.py:\d+.*Own"):
            trained(applied(backward), way)


@pytest.mark.filterwarnings("ignore::shardwright.CaptureWarning")
def test_a_backward_that_hands_its_gradient_on_is_refused() -> None:
    seen: dict[str, torch.Tensor] = {}

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        seen["norm"] = gradient.norm()
        return gradient

    model = applied(backward)
    step = stepper(model)
    with pytest.raises(CaptureError, match="hands on what it computes"):
        sw.compile_ir(lambda x: (step(x), seen["norm"]), BATCHES[0])


def test_a_backward_that_writes_to_a_buffer_is_refused() -> None:
    model = applied(lambda ctx, gradient: model.count.add_(1) * gradient)
    model.register_buffer("count", torch.ones(()).double())
    with pytest.raises(CaptureError, match="writes to a tensor that it did not make"):
        sw.compile_ir(stepper(model), BATCHES[0])


def test_another_thread_applies_functions_while_one_captures() -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        x = torch.ones(3, requires_grad=True)
        Scale.apply(x).sum().backward()
        found.append(x.grad)

    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        thread = Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x * 2

    before = Function.__dict__["apply"]
    sw.capture(applied(lambda ctx, gradient: gradient, forward), (BATCHES[0],))
    assert Function.__dict__["apply"] is before
    assert torch.equal(found[0], torch.full((3,), 0.25))
