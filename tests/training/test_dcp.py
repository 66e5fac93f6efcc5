"""What is relied on of torch.distributed.checkpoint, and what is made of it."""

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardwright.errors import WeightError
from shardwright.training.dcp import (
    TensorPiece,
    WrittenPiece,
    is_complete,
    read_pieces,
    stored_in,
    write_index,
    write_pieces,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def part(name: str, tensor: torch.Tensor, *placements: tuple[int, int]) -> TensorPiece:
    return TensorPiece(name, placements, tuple(tensor.shape), "f32")


def cut(tensor: torch.Tensor, piece: TensorPiece) -> torch.Tensor:
    return tensor[tuple(slice(start, end) for start, end in piece.placements)]


def rows(name: str, tensor: torch.Tensor, *ends: int) -> list[TensorPiece]:
    rest = [(0, size) for size in tensor.shape[1:]]
    starts = (0, *ends)
    return [
        part(name, tensor, (start, end), *rest)
        for start, end in zip(starts, (*ends, len(tensor)), strict=True)
    ]


def save(directory: Path, tensor: torch.Tensor, writers: list[TensorPiece]) -> list[WrittenPiece]:
    written = []
    for number, piece in enumerate(writers):
        written += write_pieces(directory, number, {piece: cut(tensor, piece)})
    return written


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))


def test_plain_torch_reads_what_was_written(tmp_path: Path, model: torch.nn.Module) -> None:
    contents = model.state_dict()
    weight = contents.pop("0.weight")
    written = save(tmp_path, weight, rows("0.weight", weight, 1, 4))
    others = {TensorPiece.whole(name, tensor): tensor for name, tensor in contents.items()}
    written += write_pieces(tmp_path, 3, others)
    write_index(tmp_path, written)
    found = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(found, checkpoint_id=tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert is_complete(tmp_path)


def test_torch_converts_what_was_written(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    write_index(tmp_path / "sharded", save(tmp_path / "sharded", weight, rows("w", weight, 2)))
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt")["w"], weight)


def test_what_plain_torch_wrote_is_read(tmp_path: Path, model: torch.nn.Module) -> None:
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    piece = part("0.weight", model[0].weight, (2, 5), (1, 3))
    found = torch.zeros(3, 2)
    read_pieces(tmp_path, {piece: found})
    assert torch.equal(found, model[0].weight[2:5, 1:3])
    assert stored_in(tmp_path)["1.num_batches_tracked"] == ((), torch.int64)


def test_a_tied_parameter_is_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    written = save(tmp_path, weight, rows("wte", weight, 32))
    write_index(tmp_path, written, {"head": "wte"})
    found = {"wte": torch.zeros(64, 64), "head": torch.zeros(64, 64)}
    dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["head"], weight)
    assert torch.equal(found["wte"], weight)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1.5 * weight.nbytes


@settings(max_examples=20)
@given(st.data())
def test_any_slicing_reads_any_other(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    shape = data.draw(st.tuples(st.integers(2, 6), st.integers(2, 6)))
    tensor = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    directory = tmp_path_factory.mktemp("sliced")
    cuts = data.draw(st.lists(st.integers(1, shape[0] - 1), unique=True, max_size=3))
    write_index(directory, save(directory, tensor, rows("w", tensor, *sorted(cuts))))
    ranges = [
        tuple(
            sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
        )
        for size in shape
    ]
    piece = part("w", tensor, *ranges)
    found = torch.full(piece.sizes, -1.0)
    read_pieces(directory, {piece: found})
    assert torch.equal(found, cut(tensor, piece))


def test_parts_that_begin_at_the_same_place_are_told_apart(tmp_path: Path) -> None:
    tensor = torch.randn(6, 4)
    write_index(tmp_path, save(tmp_path, tensor, rows("w", tensor, 3)))
    pieces = [
        part("w", tensor, *ranges)
        for ranges in (((0, 6), (0, 2)), ((0, 3), (0, 4)), ((0, 6), (0, 4)), ((2, 5), (0, 1)))
    ]
    found = {piece: torch.full(piece.sizes, torch.nan) for piece in pieces}
    read_pieces(tmp_path, found)
    assert all(torch.equal(content, cut(tensor, piece)) for piece, content in found.items())


def test_a_checkpoint_that_holds_a_part_of_what_is_needed_is_refused(tmp_path: Path) -> None:
    tensor = torch.randn(6, 4)
    write_index(tmp_path, save(tmp_path, tensor, rows("w", tensor, 4)[:1]))
    read_pieces(tmp_path, {part("w", tensor, (1, 4), (0, 4)): torch.zeros(3, 4)})
    with pytest.raises(WeightError, match="holds 8 of the 12 elements of 'w'"):
        read_pieces(tmp_path, {part("w", tensor, (2, 5), (0, 4)): torch.zeros(3, 4)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes_and_no_dimensions(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.ones((), dtype=dtype)
    piece = TensorPiece.whole("step", tensor)
    write_index(tmp_path, write_pieces(tmp_path, 0, {piece: tensor}))
    found = torch.zeros((), dtype=dtype)
    read_pieces(tmp_path, {piece: found})
    assert torch.equal(found, tensor)


def test_errors_name_checkpoint_and_tensor(tmp_path: Path) -> None:
    weight = torch.randn(4, 2)
    write_index(tmp_path, save(tmp_path, weight, rows("w", weight)))
    with pytest.raises(WeightError, match="holds no 'v'"):
        read_pieces(tmp_path, {TensorPiece.whole("v", weight): weight})
    other = torch.zeros(4, 3)
    with pytest.raises(WeightError, match=r"'w' as f32\[4, 2\], the program has f32\[4, 3\]"):
        read_pieces(tmp_path, {TensorPiece.whole("w", other): other})
    with pytest.raises(WeightError, match="no index to read"):
        stored_in(tmp_path / "nothing")


def test_an_index_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(warnings.warn))
    with pytest.raises(WeightError, match=r"warnings\.warn has no place"):
        stored_in(tmp_path)


def test_a_broken_checkpoint_is_not_complete(tmp_path: Path) -> None:
    weight = torch.randn(40, 20)
    written = save(tmp_path, weight, rows("w", weight, 20))
    assert not is_complete(tmp_path)
    write_index(tmp_path, written)
    assert is_complete(tmp_path)
    file = tmp_path / written[1].file
    file.write_bytes(file.read_bytes()[:-1])
    assert not is_complete(tmp_path)
    file.unlink()
    assert not is_complete(tmp_path)


def test_torch_names_the_place_of_a_piece_as_this_package_does() -> None:
    assert list(_StorageInfo.__dataclass_fields__)[:3] == ["relative_path", "offset", "length"]
