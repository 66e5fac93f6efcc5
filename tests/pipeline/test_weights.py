"""Contents of constants: from memory and files, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright.errors import WeightError
from shardwright.pipeline import ParamValue, Pipeline, TensorInfo, Weights, write_paramfile
from tests.pipeline.parameters import FORMATS, SUFFIXES, holds, same, sample


def info(
    tensor: torch.Tensor,
    dtype: str,
    path: str,
    format: str = "safetensors",
    part: tuple[tuple[int, int], ...] | None = None,
) -> TensorInfo:
    """The constant that is this part of tensor ``w`` of a file."""
    part = tuple((0, size) for size in tensor.shape) if part is None else part
    value = ParamValue(path, format, "w", "i0", part, tuple(tensor.shape))  # type: ignore[arg-type]
    return TensorInfo(tuple(end - start for start, end in part), dtype, value)  # type: ignore[arg-type]


def read(weights: Weights, constant: TensorInfo) -> torch.Tensor:
    assert constant.value is not None
    return weights.read(constant.value, constant)


@pytest.mark.parametrize(
    ("format", "dtype"), [(format, dtype) for format in FORMATS for dtype in holds(format)]
)
def test_every_dtype_of_every_format(tmp_path: Path, format: str, dtype: str) -> None:
    if format == "torch.export" and dtype not in ("f8", "bool"):
        return  # slow to write; test_paramfiles reads them all from one file
    tensor = sample(dtype, 4, 6)
    path = f"w{SUFFIXES[format]}"
    write_paramfile(tmp_path / path, {"w": tensor}, format)
    weights = Weights(tmp_path)
    assert same(read(weights, info(tensor, dtype, path, format)), tensor)
    part = ((1, 3), (2, 5))
    assert same(read(weights, info(tensor, dtype, path, format, part)), tensor[1:3, 2:5])


def test_contents_in_memory_go_first(tmp_path: Path) -> None:
    write_paramfile(tmp_path / "f", {"w": torch.zeros(2)})
    weights = Weights(tmp_path)
    weights.put("f", "w", torch.ones(2))
    assert torch.equal(read(weights, info(torch.ones(2), "f32", "f")), torch.ones(2))
    weights.put("f", "v", torch.ones(2))
    assert torch.equal(read(Weights(tmp_path), info(torch.ones(2), "f32", "f")), torch.zeros(2))


def test_a_part_of_contents_in_memory_is_a_copy() -> None:
    whole = torch.zeros(4, 4)
    weights = Weights()
    weights.put("m", "w", whole)
    part = read(weights, info(whole, "f32", "m", part=((1, 2), (0, 4))))
    part.fill_(1)
    assert not whole.any()
    assert part.untyped_storage().nbytes() == 16


def test_a_parameter_is_read_without_its_gradient() -> None:
    weights = Weights()
    weights.put("m", "w", torch.nn.Parameter(torch.ones(2)))
    assert not read(weights, info(torch.ones(2), "f32", "m")).requires_grad


def test_paths_begin_at_the_directory_or_where_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    write_paramfile(tmp_path / "w", {"w": torch.ones(2)})
    constant = info(torch.ones(2), "f32", "../w")
    assert torch.equal(read(Weights(tmp_path / "deep"), constant), torch.ones(2))
    monkeypatch.chdir(tmp_path / "deep")
    assert torch.equal(read(Weights(), constant), torch.ones(2))
    absolute = info(torch.ones(2), "f32", str(tmp_path / "w"))
    assert torch.equal(read(Weights("/nowhere"), absolute), torch.ones(2))


def test_strides_are_made() -> None:
    weights = Weights()
    weights.put("m", "w", sample("f32", 2, 3))
    constant = info(sample("f32", 2, 3), "f32", "m")
    constant.strides = (1, 2)
    found = read(weights, constant)
    assert found.stride() == (1, 2)
    assert torch.equal(found, sample("f32", 2, 3))


def test_load_reads_all_constants_and_only_them(tmp_path: Path) -> None:
    write_paramfile(tmp_path / "f", {"w": torch.ones(2)})
    weights = Weights(tmp_path)
    found = weights.load(
        {
            "a": info(torch.ones(2), "f32", "f"),
            "b": info(torch.ones(2), "f32", "f", part=((1, 2),)),
            "state": TensorInfo((2, 3), "i16", strides=(1, 2), init="zeros"),
            "x": TensorInfo((4,), "f32"),
        }
    )
    assert found.keys() == {"a", "b", "state"}
    assert torch.equal(found["b"], torch.ones(1))
    assert found["state"].stride() == (1, 2)
    assert same(found["state"], torch.zeros(2, 3, dtype=torch.int16))


def test_a_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_paramfile(tmp_path / "f", {"w": torch.ones(2)})
    import shardwright.pipeline.weights as module

    opened = []
    original = module.open_paramfile
    monkeypatch.setattr(module, "open_paramfile", lambda *a: opened.append(a) or original(*a))
    constant = info(torch.ones(2), "f32", "f")
    Weights(tmp_path).load({str(i): constant for i in range(5)})
    assert len(opened) == 1


@pytest.mark.parametrize("ask", ["read", "load", "check"])
@pytest.mark.parametrize("format", ["safetensors", "torch.save"])
@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({}, "there is no tensor 'w'"),
        ({"w": torch.ones(2, 3, dtype=torch.float64)}, "is f64, the pipeline expects f32"),
        ({"w": torch.ones(3, 2)}, r"has the shape \[3, 2\], the pipeline expects \[2, 3\]"),
        ({"w": torch.ones(2, 4)}, r"has the shape \[2, 4\], the pipeline expects \[2, 3\]"),
        ({"w": torch.ones(6)}, r"has the shape \[6\], the pipeline expects \[2, 3\]"),
        (None, "does not exist; put the parameter file there"),
    ],
)
def test_contents_that_are_not_what_the_pipeline_says(
    tmp_path: Path,
    ask: str,
    format: str,
    stored: dict[str, torch.Tensor] | None,
    message: str,
) -> None:
    if stored is not None:
        write_paramfile(tmp_path / "f", stored, format)  # type: ignore[arg-type]
    constant = info(torch.ones(2, 3), "f32", "f", format)
    weights = Weights(tmp_path)
    with pytest.raises(WeightError, match=message) as caught:
        read(weights, constant) if ask == "read" else getattr(weights, ask)({"c": constant})
    assert str(tmp_path / "f") in str(caught.value)
    if ask != "read":
        assert str(caught.value).startswith("constant 'c': ")


@pytest.mark.parametrize("shape", [(2, 3), (1, 9), (3,)])
def test_without_a_whole_shape_the_part_must_be_there(shape: tuple[int, ...]) -> None:
    """Files of the specification do not say how large the stored tensor was."""
    weights = Weights()
    weights.put("m", "w", torch.ones(shape))
    constant = info(torch.ones(2, 4), "f32", "m")
    assert constant.value is not None
    constant.value.shape = None
    with pytest.raises(WeightError, match=r"the pipeline takes \[0, 2\), \[0, 4\) of it"):
        read(weights, constant)
    weights.put("m", "w", torch.ones(2, 9))
    assert read(weights, constant).shape == (2, 4)


def test_contents_on_meta_cannot_be_read() -> None:
    weights = Weights()
    weights.put("m", "w", torch.ones(2, device="meta"))
    with pytest.raises(WeightError, match="'w' has no contents"):
        read(weights, info(torch.ones(2), "f32", "m"))


def test_check_reads_no_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_paramfile(tmp_path / "f", {"w": torch.ones(2)})
    monkeypatch.setattr("shardwright.pipeline.paramfiles.Paramfile.read", None)
    Weights(tmp_path).check({"c": info(torch.ones(2), "f32", "f"), "x": TensorInfo((1,), "f32")})


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """``in/a.json``, and its weights ``w`` outside of that folder and, as a link, inside."""
    (tmp_path / "in").mkdir()
    write_paramfile(tmp_path / "w", {"w": torch.ones(2)})
    (tmp_path / "in" / "link").symlink_to(tmp_path / "w")
    return tmp_path


@pytest.mark.parametrize("path", ["../w", "link", "{}/w", "../in/../w", "p" * 5000, "a\0b"])
def test_parameter_files_stay_in_the_folder_of_the_file(elsewhere: Path, path: str) -> None:
    weights = Weights(elsewhere / "in", folders=[elsewhere / "in"])
    constant = info(torch.ones(2), "f32", path.format(elsewhere))
    with pytest.raises(WeightError, match=r"lies outside of .*weights_in=|is no path of a file"):
        read(weights, constant)


def test_another_folder_is_allowed_by_name(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, away = elsewhere / "in" / "a.json", Path("..", "w")
    doubled = doubling(str(away))
    file.write_bytes(doubled.to_json())
    with pytest.raises(WeightError, match="lies outside of"):
        sw.run(file, torch.ones(2), in_process=True)
    given = Pipeline.load(file, weights_in=elsewhere)
    assert sw.run(given, torch.ones(2), in_process=True).tolist() == [2, 2]
    monkeypatch.setenv("SHARDWRIGHT_WEIGHTS_IN", str(elsewhere))
    assert sw.run(file, torch.ones(2), in_process=True).tolist() == [2, 2]
    monkeypatch.delenv("SHARDWRIGHT_WEIGHTS_IN")
    given.save(elsewhere / "b.json")
    assert sw.run(elsewhere / "b.json", torch.ones(2), in_process=True).tolist() == [2, 2]


def doubling(path: str) -> Pipeline:
    """A pipeline that adds the constant ``w`` of a parameter file."""
    builder = sw.Builder("adds")
    x, w = builder.input("x", (2,)), builder.param("w", torch.ones(2))
    graph = builder.finish(builder.call("aten.add.Tensor", x, w))
    pipeline = sw.build(graph, sw.plan(graph, devices=1))
    for tensor in pipeline.tensors.values():
        if tensor.value is not None:
            tensor.value.path = path
    return pipeline
