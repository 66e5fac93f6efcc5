"""Generated code of models whose names are not what stands behind a dot in Python."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from tests.codegenerate.checkers import assert_passes_mypy, assert_passes_ruff
from tests.codegenerate.written import configured, run, stages, written

WIDTH = 4


class Registered(nn.Module):
    """Tensors under a number, a keyword, a text and a private name."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        for name in ("0", "a-b", "class", "__private", 'say "x"\n'):
            self.register_parameter(name, nn.Parameter(torch.rand(WIDTH)))
        for name in ("1", "c-d", "def"):
            self.register_buffer(name, torch.rand(WIDTH))
        self.register_parameter("tied-to", self.own.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            x = x * tensor.sum() + tensor[0] if tensor.dim() > 1 else x + tensor
        return x


class Buffers(nn.Module):
    """A holder of buffers under numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Module()
        self.held.register_buffer("0", torch.rand(WIDTH))
        self.held.register_buffer("1", torch.rand(WIDTH))
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x + self.held.get_buffer("0")) * self.held.get_buffer("1")


class Methods(nn.Module):
    """Children under numbers beside those that have the names of a dictionary's methods."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("0", "1", "keys", "values", "items", "update", "pop"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class Letters(nn.Module):
    """Names that look like numbers, and a comparison with a truth value."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("l", torch.rand(WIDTH))
        self.register_buffer("O", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        l = self.end(x) + self.l  # noqa: E741
        O = l.exp() * l + self.O  # noqa: E741
        I = O.sin() * O  # noqa: E741
        mask = I > 0
        picked = (mask == True) | (mask != False)  # noqa: E712
        return torch.where(picked, I, l)


MODELS = (Registered, Buffers, Methods, Letters)


@pytest.mark.parametrize("model_class", MODELS)
@pytest.mark.parametrize("count", [1, 2])
def test_names_and_numbers_are_the_models(
    model_class: type[nn.Module], count: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = model_class().double(), torch.rand(2, WIDTH, dtype=torch.float64)
    graph = sw.capture(model, (x,))
    module = written(graph, count, tmp_path)
    configuration = configured(module, model)
    (found,) = run(
        configuration, dict(zip(configuration["model inputs"], [x], strict=True))
    ).values()
    assert torch.equal(found, model(x))
    held = {name for stage in stages(configuration) for name in stage.state_dict()}
    assert held == set(model.state_dict())
    assert_passes_ruff([Path(str(module.__file__))])


@pytest.mark.parametrize("count", [1, 2])
def test_generated_code_of_odd_names_is_typed(count: int, tmp_path: Path) -> None:
    for model_class in MODELS:
        graph = sw.capture(model_class(), (torch.rand(2, WIDTH),))
        written(graph, count, tmp_path)
    assert_passes_mypy(tmp_path.glob("*.py"))


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        x = torch.zeros(())
        for tensor in given.values():
            x = self.first(x + tensor)
        return self.second(x)


@pytest.mark.parametrize("count", [1, 2])
def test_inputs_under_any_key(count: int, tmp_path: Path) -> None:
    keys = ["a b", "a-b", "a\nb", 'a"b', "a\\b", "a\x7fb", "a\u2028b", "ключ", "{x}"]
    given = {key: torch.rand(2, WIDTH) for key in keys}
    model = Keyed()
    module = written(sw.capture(model, (given,)), count, tmp_path)
    configuration = configured(module, model)
    assert set(configuration["model inputs"]) >= {f"given_{key}" for key in keys}
    inputs = dict(zip(configuration["model inputs"], given.values(), strict=True))
    (found,) = run(configuration, inputs).values()
    assert torch.equal(found, model(given))
    assert_passes_ruff([Path(str(module.__file__))])
    assert all(line.isprintable() for line in Path(str(module.__file__)).read_text().split("\n"))


def test_no_class_takes_the_name_of_an_import_in_files_of_split_stages(tmp_path: Path) -> None:
    def sequence(self: nn.Module, x: Tensor) -> Tensor:
        return x.sin() * x

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    for name in ("Sequence", "ClassVar", "Slots"):
        model.append(type(name, (nn.Module,), {"forward": sequence})())
    module = written(sw.capture(model, (torch.rand(2, WIDTH),)), 1, tmp_path)
    text = Path(str(module.__file__)).read_text()
    assert "class Sequence2(" in text
    assert "class Sequence(" not in text
