"""A damaged parameter file is refused: no tensor is made of memory that is not its own."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from shardwright.errors import WeightError
from shardwright.pipeline.paramfiles import open_paramfile, write_paramfile
from shardwright.pipeline.schema import ParamfileFormat

Entries = dict[str, bytes]
TENSORS = {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}


def rewritten(
    path: Path, change: Callable[[Entries], None], packed: str = "", twice: str = ""
) -> None:
    """The zip file again, after a change of its entries, one of them packed or there twice."""
    with zipfile.ZipFile(path) as archive:
        names = {item.filename.partition("/")[2]: item.filename for item in archive.infolist()}
        entries = {short: archive.read(name) for short, name in names.items()}
    change(entries)
    with zipfile.ZipFile(path, "w") as archive:
        for short, content in entries.items():
            how = zipfile.ZIP_DEFLATED if short == packed else zipfile.ZIP_STORED
            archive.writestr(names.get(short, short), content, how)
            if short == twice:
                archive.writestr(names[short], bytes(len(content)))


def shorter(entries: Entries) -> None:
    entries["data/0"] = entries["data/0"][:-4]


def longer(entries: Entries) -> None:
    entries["data/0"] += b"more"


def none(entries: Entries) -> None:
    del entries["data/0"]


def no_pickle(entries: Entries) -> None:
    del entries["data.pkl"]


def larger_in_the_pickle(entries: Entries) -> None:
    """Six elements become sixty."""
    before = entries["data.pkl"]
    at = before.index(b"FloatStorage")
    assert b"K\x06" in before[at:]
    entries["data.pkl"] = before[:at] + before[at:].replace(b"K\x06", b"K\x3c")


def same(entries: Entries) -> None:
    """Nothing."""


@pytest.mark.parametrize(
    "change", [shorter, longer, none, no_pickle, larger_in_the_pickle], ids=lambda f: f.__name__
)
def test_torch_save(change: Callable[[Entries], None], tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    write_paramfile(path, TENSORS, "torch.save")
    rewritten(path, change)
    with pytest.raises(WeightError, match=r"data/0|data\.pkl"):
        open_paramfile(path, "torch.save")


@pytest.mark.parametrize(
    ("packed", "twice", "why"), [("data/0", "", "is packed"), ("", "data/0", "of one name")]
)
def test_torch_save_written_by_another(packed: str, twice: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    write_paramfile(path, {"a": torch.arange(6.0) if not packed else torch.randn(6)}, "torch.save")
    with pytest.warns(UserWarning, match="Duplicate") if twice else nullcontext():
        rewritten(path, same, packed, twice)
    with pytest.raises(WeightError, match=why):
        open_paramfile(path, "torch.save")


def test_what_torch_save_writes_beside_tensors_is_let_be(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    kept = {"epoch": 3, "nested": {"size": torch.Size([2])}, "steps": [1, 2]}
    wide = torch.zeros(3, dtype=torch.uint16)
    torch.save({**TENSORS, **kept, "wide": wide, "p": torch.nn.Parameter(wide.float())}, path)
    file = open_paramfile(path, "torch.save")
    assert [*file.names()] == ["a", "b", "wide", "p"]
    assert torch.equal(file.read("a"), TENSORS["a"])


@pytest.mark.parametrize("format", ["torch.save", "torch.export"])
def test_a_record_whose_own_header_is_damaged(format: ParamfileFormat, tmp_path: Path) -> None:
    """It says where the bytes begin, whatever the list at the end of the file says."""
    path = tmp_path / "w"
    write_paramfile(path, {"a": torch.arange(6.0)}, format)
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(("data/0", "/weight_0"))]
        begin = archive.getinfo(names[0]).header_offset
    data = bytearray(path.read_bytes())
    data[begin + 30] ^= 4  # of its name
    path.write_bytes(data)
    with pytest.raises(WeightError, match="cannot be read"):
        open_paramfile(path, format)


@pytest.mark.parametrize("content", [b"", b"\0\0"])
def test_an_exported_tensor_without_its_bytes(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.pt2"
    write_paramfile(path, {"a": torch.arange(6.0)}, "torch.export")

    def emptied(entries: Entries) -> None:
        config = json.loads(entries["data/weights/model_weights_config.json"])["config"]
        entries[f"data/weights/{config['a']['path_name']}"] = content

    rewritten(path, emptied)
    with pytest.raises(WeightError, match="cannot be read"):
        open_paramfile(path, "torch.export").read("a")


@pytest.mark.parametrize("format", ["torch.save", "torch.export"])
def test_good_files_are_read(format: ParamfileFormat, tmp_path: Path) -> None:
    write_paramfile(tmp_path / "w", TENSORS, format)
    file = open_paramfile(tmp_path / "w", format)
    for name, tensor in TENSORS.items():
        assert torch.equal(file.read(name), tensor)
