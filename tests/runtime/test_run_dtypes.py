"""Every dtype goes the whole way: capture, stages and splits, the file, both ways of running."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from tests.pipeline.parameters import sample

EXTENSIONS = ("u8", "u16", "u32", "u64", "c64", "c128")


class Passing(nn.Module):
    """An input and a stored tensor of one dtype, joined, and passed on by a second layer."""

    held: Tensor

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.register_buffer("held", sample(dtype, 4, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([x, self.held], 0)
        return both.reshape(2, 4, 6).transpose(0, 1), both[1:3]


class Rows(nn.Module):
    """Rows by themselves."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, torch.cat([x[:, 3:], x[:, :3]], 1)], 1).transpose(1, 2)


class Images(nn.Module):
    """Pictures as loaders give them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float() / 255)


class Rotary(nn.Module):
    """Rotary embeddings by `torch.polar`, conjugated and sent on; two layers use the table."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        angles = torch.arange(24.0).view(6, 4)
        self.register_buffer("table", torch.polar(torch.ones(6, 4), angles))

    def turn(self, x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * table).flatten(-2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        back = self.table.conj()
        x = self.turn(self.first(x), self.table)
        return self.turn(self.second(x), back), torch.fft.fft(x)


@pytest.mark.parametrize("lowered", [False, True], ids=["FX", "dfg"])
@pytest.mark.parametrize("dtype", EXTENSIONS)
def test_a_dtype_goes_across_stages_through_a_file(
    tmp_path: Path, dtype: str, lowered: bool
) -> None:
    model, x = Passing(dtype), sample(dtype, 4, 6).flip(0)
    graph = sw.capture(model, (x,))
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    (sw.lower(pipeline) if lowered else pipeline).save(tmp_path / "a.json")
    assert any(t.kind == "send" and read(tmp_path, t.inputs[0]) == dtype for t in tasks(tmp_path))
    sw.verify(tmp_path / "a.json", model, (x,))


def tasks(folder: Path) -> list[sw.pipeline.SuperTask]:
    return list(sw.Pipeline.load(folder / "a.json").supertasks.values())


def read(folder: Path, tensor: str) -> str:
    return sw.Pipeline.load(folder / "a.json").tensors[tensor].dtype


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(
    ("make", "x", "how"),
    [
        (Images, torch.randint(0, 256, (4, 6), dtype=torch.uint8), {"devices": 2}),
        (Images, torch.randint(0, 256, (4, 6), dtype=torch.uint8), {"mesh": {"tensor": 2}}),
        (Rotary, torch.randn(2, 6, 8), {"devices": 2}),
        (Rotary, torch.randn(2, 6, 8), {"mesh": {"tensor": 2}}),
        (Rotary, torch.randn(2, 6, 8), {"mesh": {"data": 2}}),
        (lambda: Passing("u64"), sample("u64", 4, 6), {"devices": 2}),
        (lambda: Passing("c128"), sample("c128", 4, 6), {"devices": 2}),
        (Rows, sample("u64", 4, 6), {"mesh": {"data": 2}}),
        (Rows, sample("u16", 4, 6), {"mesh": {"pipeline": 2, "data": 2}}),
    ],
)
def test_models_of_other_dtypes_are_eager_s(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    x: Tensor,
    how: dict[str, object],
    in_process: bool,
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    graph = sw.capture(model, (x,))
    sw.build(graph, sw.plan(graph, **how)).save(tmp_path / "a.json")
    tolerance = 1e-6 if "mesh" in how else 0
    sw.verify(tmp_path / "a.json", model, (x,), in_process=in_process, tolerance=tolerance)


def test_verify_looks_at_both_parts_of_complex_numbers() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    graph = sw.capture(Turned(1.0), (x,))
    pipeline = sw.build(graph, sw.plan(graph, devices=1))
    with pytest.raises(sw.VerifyError):
        sw.verify(pipeline, Turned(-1.0), (x,))


class Turned(nn.Module):
    """Its imaginary part has the sign that it is made with."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x.real, x.imag * self.sign)
