"""What `create_pipeline_configuration` of a generated file does: modes, devices, ties, refusals."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.codegenerate.codegen import formatted
from shardwright.codegenerate.writing import file
from shardwright.errors import CodegenError
from tests.codegenerate.written import configured, cut, run, stages, written


class Modal(nn.Module):
    """Layers that go by their mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x))))


class Tied(nn.Module):
    """Both ends are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 0.3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(tokens)) * self.scale)


X = torch.linspace(-1, 1, 24).reshape(6, 4)


def modal(*, training: bool) -> Modal:
    torch.manual_seed(0)
    return Modal().train(training)


def same_as(model: nn.Module, configuration: dict[str | int, Any]) -> bool:
    """Whether the stages do and draw what a copy of the model does, and move the same buffers."""
    eager = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = eager(X)
    torch.manual_seed(1)
    (found,) = run(configuration, {"x": X}).values()
    state = model.state_dict()
    moved = all(torch.equal(state[key], tensor) for key, tensor in eager.state_dict().items())
    return torch.equal(found, expected) and moved


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["norm", "drop"])
@pytest.mark.parametrize("places", [(), (2,)])
def test_a_layer_captured_in_a_mode_of_its_own_keeps_it(
    name: str, training: bool, places: tuple[int, ...], tmp_path: Path
) -> None:
    model = modal(training=training)
    model.get_submodule(name).train(not training)
    graph = sw.capture(model, (X,))
    module = written(graph, cut(graph, places), tmp_path)
    assert same_as(model, configured(module, model))
    fresh = configured(module)
    for stage in stages(fresh):
        stage.load_state_dict(model.state_dict(), strict=False)
    eager = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = eager(X)
    torch.manual_seed(1)
    (found,) = run(fresh, {"x": X}).values()
    assert torch.equal(found, expected)


class Unsorted(nn.Module):
    """Outputs in an order that is not that of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.one(x)
        return {"zz": y, "aa": self.two(y)}


def test_outputs_are_sorted_by_name(tmp_path: Path) -> None:
    model = Unsorted().eval()
    graph = sw.capture(model, (X,))
    configuration = configured(written(graph, cut(graph, (1,)), tmp_path), model)
    assert configuration["model outputs"] == ["aa", "zz"]
    found, expected = run(configuration, {"x": X}), model(X)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_modules_have_the_modes_of_the_models(tmp_path: Path) -> None:
    graph = sw.capture(modal(training=True), (X,))
    model = modal(training=True)
    model.norm.eval()
    (stage,) = stages(configured(written(graph, cut(graph, []), tmp_path), model))
    modes = {path: module.training for path, module in stage.named_modules()}
    assert modes == {"": True, "first": True, "norm": False, "drop": True, "last": True}
    assert torch.equal(model.norm.running_mean, torch.zeros(4))


def test_dropout_that_was_not_captured_is_said(tmp_path: Path) -> None:
    graph = sw.capture(modal(training=False), (X,))
    module = written(graph, cut(graph, [1]), tmp_path)
    model = modal(training=True)
    with pytest.warns(UserWarning, match=r"has dropout \(drop\), but .* capture it in training"):
        configured(module, model)
    model.drop.p = 0.0
    configured(module, model)
    configured(module, modal(training=False))
    assert "In evaluation there is no dropout" in " ".join(str(module.__doc__).split())


# --- devices --------------------------------------------------------------------------------------

DTYPES = (torch.float64, torch.bfloat16)
"""What stands for the devices cuda:0 and cuda:1."""


def moved(module: Any, model: nn.Module | None, patch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The stages as they are moved where there are two GPUs; a dtype stands for a GPU."""
    to = Tensor.to

    def to_dtype(self: Tensor, device: str) -> Tensor:
        return to(self, DTYPES[int(device.removeprefix("cuda:"))])

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    patch.setattr(Tensor, "to", to_dtype)
    found = list(module.create_pipeline_configuration(model, partitions_only=True).values())
    patch.undo()
    return found


def test_what_is_moved_is_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    graph = sw.capture(model, (torch.arange(3),))
    module = written(graph, cut(graph, [1]), tmp_path)
    model(torch.arange(3)).sum().backward()
    parts = moved(module, model, monkeypatch)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for part in parts:
        for name, tensor in (*part.named_parameters(remove_duplicate=False), *part.named_buffers()):
            assert tensor is tensors[name], name
    first, second = DTYPES
    assert tensors["embed.weight"].dtype == tensors["head.weight"].dtype == first
    assert tensors["middle.weight"].dtype == tensors["scale"].dtype == second
    assert model.middle.weight.grad is not None
    assert model.middle.weight.grad.dtype == second


def test_debug_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    graph = sw.capture(model, (torch.arange(3),))
    module = written(graph, cut(graph, [1]), tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for given in ({"debug": True}, {"DEBUG": True}):
        module.create_pipeline_configuration(model, **given)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


# --- ties and refusals ----------------------------------------------------------------------------


def test_stages_without_a_model_are_tied_as_it_is(tmp_path: Path) -> None:
    model = Tied()
    graph = sw.capture(model, (torch.arange(3),))
    first, second = stages(configured(written(graph, cut(graph, [1]), tmp_path)))
    assert first.embed.weight is second.head.weight
    twin = copy.deepcopy(nn.ModuleList([first, second]))
    assert twin[0].embed.weight is twin[1].head.weight


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (nn.Embedding(12, 4), r"'embed.weight' is torch.float32\[12, 4\], expected .*\[11, 4\]"),
        (nn.Embedding(11, 4).double(), r"'embed.weight' is torch.float64\[11, 4\], expected"),
    ],
)
def test_a_model_of_other_sizes_is_refused(other: nn.Embedding, said: str, tmp_path: Path) -> None:
    model = Tied()
    graph = sw.capture(model, (torch.arange(3),))
    module = written(graph, cut(graph, []), tmp_path)
    model.embed = other
    with pytest.raises(ValueError, match=f"{said}.*; give the model that was partitioned"):
        configured(module, model)


# --- files ----------------------------------------------------------------------------------------


def test_text_that_is_no_python_is_refused_with_its_line() -> None:
    with pytest.raises(CodegenError, match=r"could not be formatted: .* parse at 2:5: Expected"):
        formatted("y = 1\nx = = 2\n")


SOURCE = """
from torch import nn


class Scaled(nn.Module):
    def forward(self, x):
        return x * 2 + {number}
"""


def test_a_program_that_was_edited_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "edited_program.py"
    for number in (3, 44):
        source.write_text(SOURCE.format(number=number))
        importlib.invalidate_caches()
        sys.modules.pop("edited_program", None)
        program = importlib.import_module("edited_program")
        graph = sw.capture(program.Scaled(), (X,))
        path = tmp_path / "generated.py"
        sw.codegen(cut(graph, []), path, graph=graph)
        assert f"return x * 2 + {number}" in path.read_text()
    sys.modules.pop("edited_program")


def test_operators_of_a_script_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    graph = sw.capture(model, (torch.arange(3),))
    monkeypatch.setattr(file, "module_of", lambda op: "__main__")
    with pytest.raises(CodegenError, match="define it in a module, not in a script's own"):
        sw.codegen(cut(graph, []), tmp_path / "generated.py", graph=graph)
