"""The three formats: every dtype, every kind of slice, and files that are wrong."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PipelineError, WeightError
from shardwright.ir.tensor_meta import dtype_name
from shardwright.pipeline import Pipeline, find_weights, open_paramfile, write_paramfile
from shardwright.pipeline.paramfiles import Paramfile
from tests.pipeline.parameters import FORMATS, SUFFIXES, holds, same, sample, samples


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Paramfile]:
    """The samples in each format."""
    folder = tmp_path_factory.mktemp("paramfiles")
    for format in FORMATS:
        write_paramfile(folder / f"all{SUFFIXES[format]}", samples(format), format)
    return {f: open_paramfile(folder / f"all{SUFFIXES[f]}", f) for f in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
def test_every_tensor_comes_back(files: dict[str, Paramfile], format: str) -> None:
    file = files[format]
    assert set(file.names()) == samples(format).keys()
    for name, tensor in samples(format).items():
        assert file.shape(name) == tuple(tensor.shape)
        assert file.dtype(name) == dtype_name(tensor.dtype)
        found = file.read(name)
        assert same(found, tensor), name
        assert found.is_contiguous()
        assert not found.requires_grad
        assert type(found) is torch.Tensor


@pytest.mark.parametrize(
    ("format", "dtype"),
    [(format, dtype) for format in FORMATS for dtype in holds(format)],
)
@pytest.mark.parametrize(
    "part",
    [((0, 5), (0, 6)), ((1, 3), (2, 6)), ((4, 5), (5, 6)), ((2, 2), (0, 6)), ((0, 5), (3, 3))],
)
def test_slices_of_every_dtype(
    files: dict[str, Paramfile], format: str, dtype: str, part: tuple[tuple[int, int], ...]
) -> None:
    expected = sample(dtype, 5, 6)[tuple(slice(*ends) for ends in part)]
    assert same(files[format].read(f"layers.0.{dtype}", part), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("scalar", ()),
        ("empty", ((0, 0), (1, 3))),
        ("transposed", ((1, 3), (0, 2))),
        ("part", ((1, 2), (0, 4))),
        ("tied", ((0, 1), (0, 1))),
        ("4d", ((1, 2), (0, 3), (1, 4), (4, 5))),
        ("parameter", ((2, 3),)),
        ("a name/with spaces, ünïcode", ((0, 1),)),
    ],
)
def test_slices_of_odd_tensors(
    files: dict[str, Paramfile], format: str, name: str, part: tuple[tuple[int, int], ...]
) -> None:
    expected = samples(format)[name].detach()[tuple(slice(*ends) for ends in part)]
    assert same(files[format].read(name, part), expected)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(FORMATS), st.data())
def test_any_slice(files: dict[str, Paramfile], format: str, data: st.DataObject) -> None:
    shape = (2, 3, 4, 5)
    part = tuple(
        tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape
    )
    expected = sample("bf16", *shape)[tuple(slice(*ends) for ends in part)]
    assert same(files[format].read("4d", part), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "part", [((0, 5),), (), ((0, 6), (0, 6)), ((0, 5), (-1, 6)), ((3, 2), (0, 6)), ((5, 6), (0, 1))]
)
def test_parts_that_are_not_there(
    files: dict[str, Paramfile], format: str, part: tuple[tuple[int, int], ...]
) -> None:
    with pytest.raises(WeightError, match=r"'layers\.0\.f32' has the shape \[5, 6\]"):
        files[format].read("layers.0.f32", part)


@pytest.mark.parametrize("format", FORMATS)
def test_a_tensor_that_is_not_there(files: dict[str, Paramfile], format: str) -> None:
    for ask in (files[format].shape, files[format].dtype, files[format].read):
        number = len(samples(format))
        with pytest.raises(WeightError, match=rf"no tensor 'q'; the file has {number}: .*, …"):
            ask("q")


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_read_outlives_the_file(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"w{SUFFIXES[format]}"
    write_paramfile(path, {"w": torch.ones(1000)}, format)
    file = open_paramfile(path, format)
    whole, part = file.read("w"), file.read("w", ((10, 20),))
    assert part.untyped_storage().nbytes() == 40
    del file
    gc.collect()
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(whole, torch.ones(1000))
    assert torch.equal(part, torch.ones(10))


@pytest.mark.parametrize("format", FORMATS)
def test_an_empty_file_of_parameters(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"w{SUFFIXES[format]}"
    write_paramfile(path, {}, format)
    assert list(open_paramfile(path, format).names()) == []


# --- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_parts_of_one_memory_are_written_alone(tmp_path: Path, format: str) -> None:
    whole = torch.zeros(100_000)
    path = tmp_path / f"w{SUFFIXES[format]}"
    write_paramfile(path, {"a": whole[:2], "b": whole[1:3]}, format)
    assert path.stat().st_size < 50_000


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_half_written(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"w{SUFFIXES[format]}"
    write_paramfile(path, {"w": torch.ones(3)}, format)
    before = path.read_bytes()
    with pytest.raises(WeightError, match="'b' has no contents: the model was built on the meta"):
        write_paramfile(path, {"a": torch.ones(1), "b": torch.ones(2, device="meta")}, format)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_format_that_cannot_hold_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(WeightError, match=r"w\.safetensors cannot be written as safetensors"):
        write_paramfile(path, {"q": torch.ones(2, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS)
def test_files_are_readable_by_their_own_libraries(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"w{SUFFIXES[format]}"
    tensors = {"a.b": sample("f32", 2, 3), "c": sample("i64", 4)}
    write_paramfile(path, tensors, format)
    if format == "safetensors":
        from safetensors.torch import load_file

        found = load_file(path)
    elif format == "torch.save":
        found = torch.load(path, weights_only=True)
    else:
        found = torch.export.load(path).state_dict
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)


# --- files that are wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_file(tmp_path: Path, format: str) -> None:
    with pytest.raises(WeightError, match=r"q\.bin does not exist; put the parameter file there"):
        open_paramfile(tmp_path / "q.bin", format)
    with pytest.raises(WeightError, match="is a directory"):
        open_paramfile(tmp_path, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("content", [b"", b"garbage" * 50, b"PK\x03\x04" + b"\0" * 100])
def test_garbage(tmp_path: Path, format: str, content: bytes) -> None:
    path = tmp_path / "w"
    path.write_bytes(content)
    with pytest.raises(WeightError, match=f"w cannot be read as {format}: "):
        open_paramfile(path, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_file_cut_short(tmp_path: Path, format: str, share: float) -> None:
    path = tmp_path / f"w{SUFFIXES[format]}"
    write_paramfile(path, samples(format), format)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(WeightError, match=r"cannot be read as|is no archive of"):
        open_paramfile(path, format)


@pytest.mark.parametrize(
    ("format", "other"),
    [
        pair
        for pair in itertools.permutations(FORMATS, 2)
        if pair != ("torch.save", "safetensors")  # torch.load reads safetensors files too
    ],
)
def test_a_file_of_another_format(tmp_path: Path, format: str, other: str) -> None:
    path = tmp_path / f"w{SUFFIXES[other]}"
    write_paramfile(path, {"w": torch.ones(2)}, other)
    with pytest.raises(WeightError):
        open_paramfile(path, format)


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda o, p: p.write_bytes(pickle.dumps(o))])
@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_unpickled(tmp_path: Path, format: str, save: Callable[..., None]) -> None:
    trap = tmp_path / "sprung"
    save({"w": torch.ones(2), "trap": Trap(trap)}, tmp_path / "w.pt")
    with pytest.raises(WeightError):
        open_paramfile(tmp_path / "w.pt", format)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list, expected a dict from names to tensors"),
        (torch.ones(1), "holds a Tensor, expected a dict"),
        ({"model": {"w": torch.ones(1)}}, "holds the dicts model, .* save the state dict alone"),
    ],
)
def test_torch_save_of_something_else(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(WeightError, match=message):
        open_paramfile(tmp_path / "w.pt", "torch.save")


def test_torch_save_with_more_than_tensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "epoch": 3}, tmp_path / "w.pt")
    assert open_paramfile(tmp_path / "w.pt", "torch.save").names() == ["w"]


def test_torch_save_in_its_old_form(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(WeightError, match=r"cannot be read as torch\.save"):
        open_paramfile(tmp_path / "w.pt", "torch.save")


def test_dtypes_that_a_pipeline_does_not_have(tmp_path: Path) -> None:
    write_paramfile(tmp_path / "w", {"w": torch.ones(2).to(torch.float8_e5m2)})
    assert open_paramfile(tmp_path / "w", "safetensors").dtype("w") == "F8_E5M2"


# --- checkpoints -------------------------------------------------------------------------------


def test_find_weights_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_paramfile(path, {"a": torch.ones(1), "b": torch.ones(1)})
    assert find_weights(path) == {"a": path, "b": path}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """An index of two files."""
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        write_paramfile(tmp_path / file, {name: torch.ones(1)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": files}))
    return index


def test_find_weights_in_shards(sharded: Path) -> None:
    found = find_weights(sharded)
    assert {name: path.name for name, path in found.items()} == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    for name, path in found.items():
        assert torch.equal(open_paramfile(path, "safetensors").read(name), torch.ones(1))


def test_an_index_with_a_file_missing(sharded: Path) -> None:
    (sharded.parent / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        WeightError, match=r"lists 'model-00002-of-00002\.safetensors', which is not"
    ):
        find_weights(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no index of a checkpoint"),
        ("{}", "is no index of a checkpoint: .*weight_map"),
        ('{"weight_map": {"a": 1}}', "is no index of a checkpoint"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "only safetensors files are read"),
    ],
)
def test_a_wrong_index(tmp_path: Path, text: str, message: str) -> None:
    index = tmp_path / "w.index.json"
    index.write_text(text)
    with pytest.raises(WeightError, match=message):
        find_weights(index)


def test_a_missing_index(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"w\.index\.json cannot be read: No such file"):
        find_weights(tmp_path / "w.index.json")


@pytest.mark.parametrize("format", ["torch.save", "torch.export"])
def test_a_file_that_unpacks_to_more_than_it_has_is_refused(tmp_path: Path, format: str) -> None:
    """Before any of it is unpacked."""
    write_paramfile(tmp_path / "w", {"w": torch.ones(2)}, format)  # type: ignore[arg-type]
    with (
        zipfile.ZipFile(tmp_path / "w") as source,
        zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry) + b" " * 10**7)
    with pytest.raises(WeightError, match=r"unpacks to .* compressed"):
        open_paramfile(tmp_path / "packed", format)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "w")
    with pytest.raises(WeightError, match="is no regular file"):
        open_paramfile(tmp_path / "w", "safetensors")
    with pytest.raises(PipelineError, match="no regular file"):
        Pipeline.load(tmp_path / "w")


def test_the_checkpoint_of_a_folder_is_found(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="found none"):
        find_weights(tmp_path)
    write_paramfile(tmp_path / "model-1.safetensors", {"a": torch.ones(1)})
    assert find_weights(tmp_path) == {"a": tmp_path / "model-1.safetensors"}
    write_paramfile(tmp_path / "model-2.safetensors", {"b": torch.ones(1)})
    with pytest.raises(WeightError, match=r"found model-1\.safetensors, model-2\.safetensors"):
        find_weights(tmp_path)
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert find_weights(tmp_path) == {name: tmp_path / file for name, file in shards.items()}
