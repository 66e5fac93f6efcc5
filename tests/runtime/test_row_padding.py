"""Calls with fewer rows than a pipeline was captured with."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.errors import InputError
from tests.runtime.programs import GPT

ROWS = 6


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return {"scores": self.head(y.flatten(1)).softmax(-1), "planes": y}


class Merged(nn.Module):
    """Rows of a batch and of a sequence as one dimension, apart again, and a token."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self.layer(x.flatten(0, 1)) * scale
        rows = x.shape[0]
        apart = torch.cat([self.token.expand(rows, -1, -1), flat.view(rows, 4, 8)], 1)
        return flat, apart + torch.arange(rows)[:, None, None]


class Mixing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.kind == "softmax":
            return y.softmax(0)
        if self.kind == "mean":
            return y.mean()
        if self.kind == "cumsum":
            return y.cumsum(0)
        if self.kind == "matmul":
            return y @ y.t()
        return y.view(2, ROWS // 2, 8).sum(1)


def built(model: nn.Module, *inputs: torch.Tensor, **options):
    graph = sw.capture(model.eval(), inputs)
    return sw.build(graph, sw.plan(graph, **options))


def leaves(result):
    return (
        list(result.values())
        if isinstance(result, dict)
        else list(torch.utils._pytree.tree_leaves(result))
    )


CASES = {
    "decoder": (lambda: GPT(0.0), lambda n: (torch.randint(0, 20, (n, 5)),)),
    "images": (Images, lambda n: (torch.randn(n, 3, 8, 8),)),
    "merged": (Merged, lambda n: (torch.randn(n, 4, 8), torch.ones(8))),
}


@pytest.mark.parametrize("saved", [False, True], ids=["built", "loaded"])
@pytest.mark.parametrize("name", CASES)
def test_fewer_rows_are_those_rows(name: str, saved: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model, given = make(), inputs(ROWS)
    pipeline = built(model, *given, devices=2)
    if saved:
        pipeline.save(tmp_path / "model.json")
    source = tmp_path / "model.json" if saved else pipeline
    with sw.Runner(source, in_process=True) as runner, torch.no_grad():
        for rows in (ROWS, 4, 1):
            short = [t[:rows] if t.dim() > 1 else t for t in given]
            for found, expected in zip(leaves(runner(*short)), leaves(model(*short)), strict=True):
                assert found.shape == expected.shape
                assert torch.allclose(found, expected, atol=1e-6)


MESHES = [
    {"data": 2},
    {"data": 3},
    {"tensor": 2},
    {"tensor": 3},
    {"sequence": 2},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 2, "data": 2},
    {"data": 2, "tensor": 2},
]
"""Where {"data": 3} leaves each slot two rows."""


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("lowered", [False, True], ids=["operators", "lowered"])
def test_a_split_model_takes_fewer_rows_from_its_file(mesh, lowered: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = GPT(0.0), torch.randint(0, 20, (ROWS, 6))
    pipeline = built(model, x, mesh=mesh)
    if lowered:
        pipeline = sw.lower(pipeline)
    pipeline.save(tmp_path / "model.json")
    for source in (pipeline, tmp_path / "model.json"):
        with sw.Runner(source, in_process=True) as runner, torch.no_grad():
            for rows in (5, 3, 1):
                assert torch.allclose(runner(x[:rows]), model(x[:rows]), atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_lowered_file_says_that_its_rows_are_apart(name: str, tmp_path: Path) -> None:
    """Lowered from what was built here, and from its file, which says the same."""
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model, given = make(), inputs(ROWS)
    pipeline = built(model, *given, devices=2)
    pipeline.save(tmp_path / "model.json")
    sw.lower(pipeline).save(tmp_path / "here.json")
    sw.lower(tmp_path / "model.json").save(tmp_path / "there.json")
    here, there = (sw.Pipeline.load(tmp_path / f"{n}.json") for n in ("here", "there"))
    assert here.metadata.rows == there.metadata.rows
    assert here.metadata.rows
    short = [t[:4] if t.dim() > 1 else t for t in given]
    with torch.no_grad():
        whole = leaves(model(*given))
        for found, expected in zip(
            leaves(sw.run(here, *short, in_process=True)), whole, strict=True
        ):
            assert torch.allclose(found, expected[: len(expected) // ROWS * 4], atol=1e-5)


def test_a_lowered_file_whose_rows_are_mixed_takes_all_of_them(tmp_path: Path) -> None:
    lowered = sw.lower(built(Mixing("softmax"), torch.randn(ROWS, 8), devices=1))
    assert lowered.metadata.rows == ()
    with pytest.raises(InputError, match=r"cannot be padded: the file does not say.*give 6 rows"):
        sw.run(lowered, torch.randn(4, 8), in_process=True)


def test_a_split_file_whose_rows_are_mixed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    built(Mixing("mean"), torch.randn(ROWS, 8), mesh={"data": 2}).save(path)
    with pytest.raises(InputError, match=r"has 4 rows.*the file does not say.*give 6 rows"):
        sw.run(path, torch.randn(4, 8), in_process=True)


@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("softmax", "softmax mixes the rows"),
        ("mean", "mean mixes the rows"),
        ("cumsum", "cumsum mixes the rows"),
        ("matmul", "matmul mixes the rows"),
        ("view", r".*test_row_padding.py:\d+ .*asks for the size itself"),
    ],
)
def test_what_mixes_the_rows_is_named(kind: str, operator: str) -> None:
    pipeline = built(Mixing(kind), torch.randn(ROWS, 8), devices=1)
    with pytest.raises(
        InputError, match=rf"has 4 rows, the pipeline takes 6, .*: {operator}.*give 6 rows"
    ):
        sw.run(pipeline, torch.randn(4, 8), in_process=True)


def test_other_shapes_are_refused_as_before() -> None:
    pipeline = built(Merged(), torch.randn(ROWS, 4, 8), torch.ones(8), devices=1)
    with sw.Runner(pipeline, in_process=True) as runner:
        for rows, columns in ((ROWS + 1, 8), (0, 8), (3, 7)):
            with pytest.raises(InputError, match="shapes are static"):
                runner(torch.randn(rows, 4, columns), torch.ones(8))
        with pytest.raises(InputError, match="shapes are static"):
            runner(torch.randn(3, 4, 8), torch.ones(3))


@pytest.mark.parametrize("rows", [ROWS, 4])
def test_inputs_that_no_slot_takes(rows: int) -> None:
    x = torch.randn(rows, 8)
    pipeline = built(nn.Linear(8, 8), torch.randn(ROWS, 8), devices=1)
    with sw.Runner(pipeline, in_process=True) as runner:
        for given, said in ((x.to_sparse(), "layout torch.sparse_coo"), (x.to("meta"), "meta")):
            with pytest.raises(InputError, match=f"'input' is .*{said}.*give a dense tensor"):
                runner(given)
        assert runner(x).shape == (rows, 8)
