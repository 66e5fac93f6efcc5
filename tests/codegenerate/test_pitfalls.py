"""The pitfalls of tracing that seed 001 lists, one after another, in generated code.

Each model is cut in two at every place there is, and each file is run against eager, forward and
backward, with other numbers than those it was captured with.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import shardwright as sw
from shardwright.errors import InputError
from shardwright.ir import IRGraph
from shardwright.ir.structure import flatten_call, rebuild
from tests.codegenerate.written import configured, cut, run, stages, written
from tests.tracing.equality import assert_equal_trees, leaves

ROUNDING = 1e-12
"""Gradients of what is read several times may be added up in another order."""


class Layers(nn.Module):
    """Two layers to compute with, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)


def rows(seed: int, *shape: int) -> Tensor:
    """Random numbers that gradients are wanted of."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(*(shape or (3, 4)), dtype=torch.float64, generator=generator)
    return made.requires_grad_()


def assert_same_in_two(model: nn.Module, graph: IRGraph, folder: Path, **kwargs: Any) -> str:
    """Cut at every place, run each file on other arguments, and give the last one's text."""
    text = ""
    for place in range(1, len(graph.nodes)):
        module = written(graph, cut(graph, [place]), folder)
        text = Path(str(module.__file__)).read_text()
        assert_same(model, graph, configured(module, model), kwargs)
    assert text
    return text


def assert_same(
    model: nn.Module,
    graph: IRGraph,
    configuration: Mapping[str | int, Any],
    kwargs: dict[str, Any],
) -> None:
    """Run the stages and the model, and compare results to the last bit, and gradients."""
    assert graph.in_structure is not None
    assert graph.out_structure is not None
    inputs = flatten_call(graph.in_structure, (), kwargs)
    before = [tensor.detach().clone() for tensor in inputs]
    found = run(configuration, dict(zip(configuration["model inputs"], inputs, strict=True)))
    assert all(map(torch.equal, inputs, before)), "inputs are left alone"
    flat = [found[name] for name in configuration["model outputs"]]
    expected = model(**pytree.tree_map_only(Tensor, torch.clone, kwargs))
    assert_equal_trees(rebuild(graph.out_structure, flat), expected)
    wanted = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    for ours, eagers in zip(gradients(flat, wanted), gradients(expected, wanted), strict=True):
        assert (ours is None) == (eagers is None)
        if ours is not None and eagers is not None:
            assert (ours - eagers).abs().max() <= ROUNDING * eagers.abs().max()


def gradients(results: Any, wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of the sum of squares of all results."""
    tensors = [leaf for leaf in leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    total = torch.stack([tensor.square().sum() for tensor in tensors]).sum()
    return torch.autograd.grad(total, wanted, allow_unused=True)


# --- arguments ------------------------------------------------------------------------------------


class Optional(Layers):
    """Tensors that may be given or not, one of them by keyword alone."""

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, z: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        x = self.first(x)
        if y is not None:
            x = x - 2 * y
        if z is not None:
            x = x * z
        return {"out": self.second(x), "y": y, "scaled": None if z is None else x * 3}


@pytest.mark.parametrize("given", [(), ("y",), ("z",), ("y", "z"), ("z", "y")], ids=str)
def test_keyword_arguments_and_optional_inputs(given: tuple[str, ...], tmp_path: Path) -> None:
    """``z`` given without ``y`` is ``z``: the seed took it for the second input."""
    model = Optional()
    graph = sw.capture(model, (rows(1),), {name: rows(ord(name)) for name in given})
    arguments = {"x": rows(2), **{name: rows(ord(name) + 9) for name in given}}
    assert_same_in_two(model, graph, tmp_path, **arguments)
    configuration = configured(written(graph, cut(graph, [1]), tmp_path), model)
    assert configuration["model inputs"] == ["x", *sorted(given)]
    with pytest.raises(InputError):
        flatten_call(graph.in_structure, (rows(2),), {"unknown": rows(3)})  # type: ignore[arg-type]


class Difference(Layers):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.second(self.first(x) - 2 * z)


def test_the_same_tensor_passed_twice_is_two_inputs(tmp_path: Path) -> None:
    model, x = Difference(), rows(1)
    graph = sw.capture(model, (x,), {"z": x})
    assert_same_in_two(model, graph, tmp_path, x=rows(2), z=rows(3))
    assert_same_in_two(model, graph, tmp_path, x=x, z=x)


class Words(Layers):
    """Calls that are told by a word what to do."""

    def forward(self, x: Tensor, labels: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        x = F.gelu(self.first(x), approximate="tanh")
        loss = F.nll_loss(F.log_softmax(x, -1), labels, reduction="sum")
        images = F.pad(images, (1, 1, 1, 1), mode="reflect")
        images = F.interpolate(images, scale_factor=2.0, mode="bilinear", align_corners=False)
        apart = F.nll_loss(F.log_softmax(self.second(x), -1), labels, reduction="none")
        return loss, F.mse_loss(x, self.second(x), reduction="mean"), apart, images


def test_string_arguments(tmp_path: Path) -> None:
    model = Words()
    graph = sw.capture(model, (rows(1), torch.tensor([0, 1, 2]), rows(2, 2, 2, 4, 4)))
    text = assert_same_in_two(
        model,
        graph,
        tmp_path,
        x=rows(3),
        labels=torch.tensor([3, 3, 0]),
        images=rows(4, 2, 2, 4, 4),
    )
    for word in ('approximate="tanh"', 'reduction="sum"', 'reduction="none"'):
        assert word in text


# --- control flow ---------------------------------------------------------------------------------


class Shaped(Layers):
    """A loop over the rows, and branches on how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for row in x:
            state = torch.tanh(self.first(row) + state)
        if x.shape[0] % 2:
            state = self.second(state)
        while state.ndim < x.shape[0]:
            state = state.unsqueeze(0)
        return state


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_loops_and_branches_that_depend_on_shapes(count: int, tmp_path: Path) -> None:
    model = Shaped()
    graph = sw.capture(model, (rows(1, count, 4),))
    assert_same_in_two(model, graph, tmp_path, x=rows(2, count, 4))


# --- in-place operators ---------------------------------------------------------------------------


class InPlace(Layers):
    """Writes to what a layer made, to a view of it, and to what it read before."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        before = y * 2
        y.add_(1)
        y[:, 0] = 0.5
        y[1:].mul_(before[1:])
        view = y.view(-1)
        F.relu(y, inplace=True)
        return self.second(y) + view.view_as(y), before


class Counting(Layers):
    """Counts its calls in a buffer, in place, and reads it before and after."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.calls
        self.calls.add_(1)
        return self.second(x * self.calls)


def test_in_place_operators_at_a_border(tmp_path: Path) -> None:
    model = InPlace()
    graph = sw.capture(model, (rows(1),))
    assert_same_in_two(model, graph, tmp_path, x=rows(2))


@pytest.mark.parametrize("place", range(1, 5))
def test_buffers_that_are_written_to_change_as_the_models_do(place: int, tmp_path: Path) -> None:
    model, reference = Counting(), Counting()
    graph = sw.capture(model, (rows(1),))
    configuration = configured(written(graph, cut(graph, [place]), tmp_path), model)
    for seed in range(3):
        found = run(configuration, {"x": rows(seed)})
        assert torch.equal(found["output"], reference(rows(seed)))
        assert torch.equal(model.calls, reference.calls)


# --- tied weights ---------------------------------------------------------------------------------


class Tied(nn.Module):
    """A table that is read twice, under two names, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4, dtype=torch.float64)
        self.middle = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embed(ids)).relu())
        return logits


IDS = torch.tensor([[0, 1, 2], [6, 5, 5]])


def test_tied_weights_across_stages_and_within_one(tmp_path: Path) -> None:
    model = Tied()
    graph = sw.capture(model, (IDS,))
    assert_same_in_two(model, graph, tmp_path, ids=IDS.flip(0))
    for places in ([], [1], [2], [1, 3]):
        module = written(graph, cut(graph, places), tmp_path)
        made = stages(configured(module, model))
        held = {name: p for stage in made for name, p in stage.named_parameters()}
        assert any(p is model.embed.weight for p in held.values())
        assert {id(p) for p in held.values()} == {id(p) for p in model.parameters()}
        saved = {name: t for stage in made for name, t in stage.state_dict().items()}
        assert saved.keys() == model.state_dict().keys()


@pytest.mark.parametrize("places", [[], [1], [1, 3]], ids=str)
def test_tied_weights_are_trained_as_one(places: list[int], tmp_path: Path) -> None:
    model, reference = Tied(), Tied()
    graph = sw.capture(model, (IDS,))
    configuration = configured(written(graph, cut(graph, places), tmp_path), model)
    parameters = {id(p): p for stage in stages(configuration) for p in stage.parameters()}
    ours = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    eagers = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        ours.zero_grad()
        run(configuration, {"ids": IDS})["output"].square().sum().backward()
        ours.step()
        eagers.zero_grad()
        reference(IDS).square().sum().backward()
        eagers.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_tied_weights_within_a_stage_stay_one_without_the_model(tmp_path: Path) -> None:
    graph = sw.capture(Tied(), (IDS,))
    (stage,) = stages(configured(written(graph, cut(graph, []), tmp_path)))
    held = dict(stage.named_parameters(remove_duplicate=False))
    assert held["head.weight"] is held["embed.weight"]
    assert len(list(stage.parameters())) == 3
