"""What generated modules hold: constants, buffers that change, ties and frozen parameters."""

import base64
import re
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.codegenerate.writing.contents import encoded
from shardwright.errors import CodegenError
from tests.codegenerate.checkers import assert_passes_mypy, assert_passes_ruff
from tests.codegenerate.written import configured, cut, run, stages, written

WIDTH = 100


def rows(seed: int, width: int = WIDTH) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed))


def assert_same(model: nn.Module, ours: nn.Module, x: Tensor, folder: Path) -> str:
    """Three calls of the stages of ``ours`` against ``model``; gives the last file's text."""
    graph = sw.capture(ours, (x,))
    module = written(graph, cut(graph, []), folder)
    configuration = configured(module, ours)
    for seed in range(3):
        x = rows(seed, x.shape[-1])
        found, expected = run(configuration, {"x": x}), model(x)
        flat = expected if isinstance(expected, tuple) else (expected,)
        for output, tensor in zip(configuration["model outputs"], flat, strict=True):
            assert torch.equal(found[output], tensor)
    for (key, one), other in zip(model.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(one, other), key
    return Path(str(module.__file__)).read_text()


# --- constants ------------------------------------------------------------------------------------


class Tables(nn.Module):
    """A plain tensor, here or in a layer, and a buffer that no checkpoint holds."""

    def __init__(self, width: int = WIDTH, buffer: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.randn(width)
        self.inner = Inner()
        self.register_buffer("plain", torch.randn(buffer), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.table[:WIDTH] + self.plain[:WIDTH]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.randn(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.kept


@pytest.mark.parametrize("fresh", [False, True])
def test_long_constants_hold_what_they_did(fresh: bool, tmp_path: Path) -> None:
    model = Tables()
    graph = sw.capture(model, (rows(0),))
    configuration = configured(written(graph, cut(graph, []), tmp_path), None if fresh else model)
    assert torch.equal(run(configuration, {"x": rows(1)})["output"], model(rows(1)))
    (stage,) = stages(configuration)
    assert (stage.plain is model.plain) is not fresh


def test_constants_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    graph = sw.capture(Tables(width=60_000), (rows(0),))
    with pytest.raises(CodegenError, match=r"'table', f32\[60000\].*register it as a buffer"):
        written(graph, cut(graph, []), tmp_path)


def test_buffers_that_no_file_can_hold_need_the_model(tmp_path: Path) -> None:
    model = Tables(buffer=60_000)
    graph = sw.capture(model, (rows(0),))
    module = written(graph, cut(graph, []), tmp_path)
    with pytest.raises(ValueError, match=r"give the model: .* file: plain"):
        configured(module)
    found = run(configured(module, model), {"x": rows(1)})
    assert torch.equal(found["output"], model(rows(1)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 13),
        torch.randn(13, 7).t(),
        torch.randn(70) > 0,
        torch.randn(70, dtype=torch.complex64),
        torch.randn(70).bfloat16(),
        torch.randint(-9, 9, (2, 3, 70)),
        torch.tensor(1 + 2j),
    ],
    ids=lambda t: str(t.dtype),
)
def test_encoded_tensors_are_what_they_were(tensor: Tensor) -> None:
    text = encoded(tensor)
    assert text is not None
    found = eval(text, {"torch": torch, "base64": base64, "zlib": zlib})
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(found, tensor)


class Named(nn.Module):
    """A buffer with the name that constants are given; it is read in another stage, or nowhere."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.read = torch.randn(WIDTH), read
        self.register_buffer("constant", torch.full((WIDTH,), 3.0))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x * self.table))
        return x + self.constant if self.read else x


@pytest.mark.parametrize("read", [False, True])
def test_constants_are_not_taken_for_buffers_of_their_names(read: bool, tmp_path: Path) -> None:
    model = Named(read)
    graph = sw.capture(model, (rows(0),))
    module = written(graph, cut(graph, [len(graph.nodes) // 2]), tmp_path)
    found = run(configured(module, model), {"x": rows(1)})
    assert torch.equal(found["output"], model(rows(1)))
    text = Path(str(module.__file__)).read_text()
    assert ("self.constant_1" in text) is read


# --- buffers that change --------------------------------------------------------------------------


class Counter(nn.Module):
    """Reads the old number after it made the new one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        old = self.n
        self.n = self.n + 1
        return x * old


class Queue(nn.Module):
    """Gives a view of what it held."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.arange(6.0).reshape(6, 1) * torch.ones(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        tail = self.held[3:]
        self.held = torch.cat([tail, x])
        return tail


class Swap(nn.Module):
    """Two buffers change places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        return x + self.a


class Around(nn.Module):
    """A module inside another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2 + x


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("build", [Counter, Queue, Swap])
def test_old_contents_are_read_before_new_ones_are_there(
    build: type[nn.Module], depth: int, tmp_path: Path
) -> None:
    model, ours = build(), build()
    for _ in range(depth):
        model, ours = Around(model), Around(ours)
    assert_same(model, ours, rows(0, 4), tmp_path)


# --- ties and frozen parameters -------------------------------------------------------------------


class Contained(nn.Module):
    """Ties and frozen parameters in containers, and in containers of containers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seq = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.seq[2].weight = self.seq[0].weight
        self.seq[0].bias.requires_grad_(False)
        self.parts = nn.ModuleDict(
            {
                "0": nn.Linear(4, 4),
                "1": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
            }
        )
        self.parts["1"][2].weight = self.parts["0"].weight
        self.parts["1"][0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.seq(x) + self.parts["0"](x) * self.parts["1"](x)


@pytest.mark.parametrize("inside", [False, True])
def test_ties_and_frozen_parameters_in_containers(inside: bool, tmp_path: Path) -> None:
    model = Around(Contained()) if inside else Contained()
    graph = sw.capture(model, (rows(0, 4),))
    module = written(graph, cut(graph, []), tmp_path)
    (stage,) = stages(configured(module))
    wanted = {key: p.requires_grad for key, p in model.named_parameters()}
    assert {key: p.requires_grad for key, p in stage.named_parameters()} == wanted
    stage.load_state_dict(model.state_dict())
    assert torch.equal(stage(rows(1, 4)), model(rows(1, 4)))


# --- devices --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.up(x)).tanh()


class Layered(nn.Module):
    """An argument with the name that a loop's variable has."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(4))

    def forward(self, block: Tensor) -> Tensor:
        block = block + 1
        for one in self.h:
            block = one(block)
        return block + torch.arange(8, device=block.device)


def test_devices_are_those_of_arguments_under_the_names_they_have(tmp_path: Path) -> None:
    model = Layered()
    graph = sw.capture(model, (rows(0, 8),))
    module = written(graph, cut(graph, []), tmp_path)
    text = Path(str(module.__file__)).read_text()
    assert "for block in self.h.values():" in text
    assert re.search(r"def forward\(self, block_1: Tensor\)", text)
    assert "device=block_1.device" in text
    found = run(configured(module, model), {"block": rows(1, 8)})
    assert torch.equal(found["output"], model(rows(1, 8)))


def test_files_with_all_of_it_are_clean(tmp_path: Path) -> None:
    for model, x in ((Tables(), rows(0)), (Contained(), rows(0, 4)), (Around(Queue()), rows(0, 4))):
        graph = sw.capture(model, (x,))
        sw.codegen(cut(graph, []), tmp_path / f"{type(model).__name__.lower()}.py", graph=graph)
    files = sorted(tmp_path.glob("*.py"))
    assert_passes_ruff(files)
    assert_passes_mypy(files)
