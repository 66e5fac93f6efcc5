"""Archives of torch.export: real programs, and the numbers that are torch's own."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.errors import WeightError
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.pipeline import open_paramfile, write_paramfile
from shardwright.pipeline.archive import DTYPES, STRIDED, read_archive
from tests.pipeline.parameters import UNWRITTEN, same


class Model(nn.Module):
    """Parameters, buffers of both kinds, a tie, a view, and a tensor it closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tied = self.inner.weight
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("lost", torch.arange(4.0), persistent=False)
        self.columns = nn.Parameter(torch.randn(4, 8)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x) + self.lost + self.kept.sum()
        return hidden @ self.columns + torch.full((4,), 2.0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    model = Model()
    path = tmp_path_factory.mktemp("archive") / "model.pt2"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found")  # of ``columns``
        torch.export.save(torch.export.export(model, (torch.randn(2, 4),)), path)
    return path, model


def test_a_real_program(exported: tuple[Path, Model]) -> None:
    path, model = exported
    file = open_paramfile(path, "torch.export")
    expected = model.state_dict() | {"lost": model.lost}
    assert expected.keys() <= set(file.names())
    for name, tensor in expected.items():
        assert same(file.read(name), tensor), name


def test_the_numbers_are_those_of_torch() -> None:
    from torch._export.serde.schema import Layout
    from torch._export.serde.serialize import _TORCH_TO_SERIALIZE_DTYPE

    assert Layout.Strided.value == STRIDED
    for number, name in DTYPES.items():
        if name not in UNWRITTEN:
            assert _TORCH_TO_SERIALIZE_DTYPE[torch_dtype(name)].value == number


def test_every_dtype_is_written_by_a_torch_that_has_a_number_for_it(tmp_path: Path) -> None:
    assert UNWRITTEN == [] or torch.__version__ < "2.13"
    for name in UNWRITTEN:
        tensors = {"w": torch.ones(2).to(torch_dtype(name))}
        with pytest.raises(WeightError, match=rf"no tensors of {torch_dtype(name)}.*safetensors"):
            write_paramfile(tmp_path / "w.pt2", tensors, "torch.export")


def rewritten(path: Path, target: Path, old: bytes, new: bytes, compression: int = 0) -> Path:
    """The archive with bytes of its configuration replaced, or compressed."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w", compression) as sink:
        for name in source.namelist():
            data = source.read(name)
            sink.writestr(name, data.replace(old, new) if name.endswith("config.json") else data)
    return target


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"use_pickle": false', b'"use_pickle": true', "it is pickled, and nothing is unpickled"),
        (b'"layout": 7', b'"layout": 1', "it is no strided tensor"),
        (b'"dtype": 7', b'"dtype": 99', "dtype number 99 is none that is known"),
    ],
)
def test_tensors_that_are_refused(
    exported: tuple[Path, Model], tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    path = rewritten(exported[0], tmp_path / "w.pt2", old, new)
    with pytest.raises(WeightError, match=rf"'inner\.weight'.*{message}"):
        open_paramfile(path, "torch.export").read("inner.weight")


def test_a_compressed_archive_is_refused(exported: tuple[Path, Model], tmp_path: Path) -> None:
    path = rewritten(exported[0], tmp_path / "w.pt2", b"", b"", zipfile.ZIP_DEFLATED)
    with pytest.raises(WeightError, match="was compressed"):
        open_paramfile(path, "torch.export").read("inner.weight")


def test_bytes_that_are_fewer_than_the_shape_says(
    exported: tuple[Path, Model], tmp_path: Path
) -> None:
    path = rewritten(exported[0], tmp_path / "w.pt2", b'"as_int": 4', b'"as_int": 4000')
    with pytest.raises(WeightError, match=r"tensor 'inner\.weight' cannot be read"):
        open_paramfile(path, "torch.export").read("inner.weight")


def test_another_zip_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(WeightError, match=r"is no archive of torch\.export\.save"):
        read_archive(tmp_path / "w.pt")


def test_names_that_no_state_dict_has(tmp_path: Path) -> None:
    names = {"a": torch.ones(1), "a.b": torch.ones(2)}
    with pytest.raises(WeightError, match=r"cannot be written as torch\.export"):
        write_paramfile(tmp_path / "w.pt2", names, "torch.export")
    assert list(tmp_path.iterdir()) == []
