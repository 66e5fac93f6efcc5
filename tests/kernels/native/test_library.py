"""The library of native kernels: building it, binding calls, running programs."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from shardwright.errors import ExecError
from shardwright.kernels.lowered import BY_NAME
from shardwright.kernels.native import build, library
from shardwright.kernels.native.library import BoundCall, NativeOperand, addresses
from tests.kernels.native.calls import native_bind, native_call, native_library, operand

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def runtime_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources that builds in a second, and an empty cache; the folder."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("runtime.cpp", "abi.h"):
        shutil.copy(build.SOURCES / name, folder)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    return folder


# ---- building ----


@needs_compiler
def test_a_build_lies_in_the_cache_and_is_found_again(
    runtime_alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = build.built_library()
    assert path.is_relative_to(tmp_path / "cache")
    said = capfd.readouterr().err
    assert re.fullmatch(r"shardwright: compiling native kernels with .*once.*cache/native\n", said)
    assert isinstance(library.Library(path).bind(0, 0, b"", [], 0), str)
    monkeypatch.setattr(build, "_build", None)  # another build would fail
    assert build.built_library() == path
    assert not capfd.readouterr().err


@needs_compiler
def test_another_source_or_flag_is_another_library(
    runtime_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.built_library()
    (runtime_alone / "more.cpp").write_text("int more() { return 1; }\n")
    second = build.built_library()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DMORE"))
    assert len({first, second, build.built_library()}) == 3


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert build.cache_folder() == Path("/a")
    monkeypatch.delenv("SHARDWRIGHT_CACHE")
    assert build.cache_folder() == Path("/b/shardwright")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_folder() == Path.home() / ".cache" / "shardwright"


def load_twice(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a process that could load nothing so far is warned of, if twice it gets nothing."""
    monkeypatch.setattr(library, "load", cache(library.load.__wrapped__))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert library.load() is None
        assert library.load() is None
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


def test_without_a_compiler_there_is_one_warning(
    runtime_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    said = load_twice(monkeypatch)
    assert "no C++ compiler" in said
    assert "neither g++ nor clang++; install one" in said
    assert "SHARDWRIGHT_NATIVE=0" in said


def test_turned_off_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_NATIVE", "0")
    assert load_twice(monkeypatch) == ""


@needs_compiler
def test_a_build_that_fails_is_told_in_the_compilers_words(
    runtime_alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime_alone / "wrong.cpp").write_text("int wrong() { return nowhere; }\n")
    said = load_twice(monkeypatch)
    assert "nowhere" in said
    assert "wrong.cpp" in said
    assert "install" not in said  # There is a compiler.
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_cache_that_cannot_be_written_is_told(
    runtime_alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # anything that is there
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "file"))
    assert "cannot be built" in load_twice(monkeypatch)


def test_cxx_names_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own-c++"
    own.touch(mode=0o755)
    monkeypatch.setenv("CXX", f"{own} --with this")
    assert build.find_compiler() == (str(own), "--with", "this")
    monkeypatch.setenv("CXX", "surely-not-there")
    assert build.find_compiler() is None


@needs_compiler
@pytest.mark.processes
def test_processes_that_build_at_once_build_once(runtime_alone: Path, tmp_path: Path) -> None:
    compiler, log = build.find_compiler(), tmp_path / "log"
    assert compiler is not None
    wrapper = tmp_path / "logged"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {" ".join(compiler)} "$@"\n')
    wrapper.chmod(0o755)
    program = (
        "import sys, pathlib\n"
        "from shardwright.kernels.native import build, library\n"
        "build.SOURCES = pathlib.Path(sys.argv[1])\n"
        "print(library.Library(build.built_library()).path)\n"
    )
    command = [sys.executable, "-c", program, str(runtime_alone)]
    environment = {**os.environ, "CXX": str(wrapper)}
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [process.communicate()[0].strip() for process in started]
    assert len(set(paths)) == 1
    assert Path(paths[0]).exists()
    assert sum(" -c " in f" {line} " for line in log.read_text().splitlines()) == 1


# ---- binding and running ----


def test_what_the_kernels_rely_on_in_torchs_library() -> None:
    found = dict(zip(library.SYMBOLS, library.blas_symbols(), strict=True))
    assert found["sgemm_"]
    assert found["dgemm_"]
    if torch.backends.mkl.is_available():
        assert found["MKL_Set_Num_Threads_Local"]


def test_a_kind_without_a_kernel_is_refused_with_the_reason() -> None:
    assert native_library().bind(255, 0, b"", [], 0) == "no native kernel of this kind"
    assert native_library().bind(-1, 0, b"", [], 0) == "no native kernel of this kind"


def test_a_blob_that_is_too_short_is_refused() -> None:
    tensor = torch.ones(2, 2)
    operands = [operand(tensor, 0), operand(tensor, 1), None, None, operand(tensor, 2)]
    found = native_library().bind(BY_NAME["gemm"].id, 1, b"\0", operands, 4)
    assert found == "the blob is too short"


def test_too_many_dimensions_are_refused() -> None:
    many = NativeOperand(0, 0, "f32", (1,) * 9, (1,) * 9)
    found = native_library().bind(BY_NAME["relu"].id, 0, b"", [many, many], 1)
    assert found == "an operand has more than 8 dimensions"


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((4,), (0,), True),
        ((3, 4), (2, 1), True),
        ((3, 4), (1, 2), True),
        ((3, 4), (4, 1), False),
        ((3, 1, 4), (4, 0, 1), False),
        ((2, 3), (1, 2), False),
    ],
)
def test_an_output_whose_elements_lie_on_one_another_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool
) -> None:
    x = torch.randn(shape)
    memory = torch.zeros(16)
    y = memory.as_strided(shape, strides)
    found = native_bind("relu", {}, [x], [y])
    if overlaps:
        assert found == "elements of an output lie on one another"
    else:
        native_call("relu", {}, [x], [y])
        assert torch.equal(y, x.relu())
    assert isinstance(native_bind("relu", {}, [y], [torch.empty(shape)]), BoundCall)


def test_static_contents_are_read_when_prepared_and_only_then() -> None:
    a, b, y = torch.randn(4, 16), torch.randn(16, 8), torch.empty(4, 8)
    bound = native_bind("gemm", {}, [a, b, None, None], [y], static=(1,))
    assert isinstance(bound, BoundCall)
    bases = addresses([a.data_ptr(), b.data_ptr(), None, None, y.data_ptr()])
    program = native_library().program([bound])
    bound.prepare(bases)
    program.run(bases)
    first = a @ b
    assert torch.allclose(y, first, atol=1e-5)
    b.zero_()
    program.run(bases)
    assert torch.allclose(y, first, atol=1e-5)
    bound.prepare(bases)
    program.run(bases)
    assert not y.any()


def gemm_chain(width: int) -> library.NativeProgram:
    """y = relu(x w) w, of buffers x, w, y and one between, which are 64 bytes into theirs."""
    blob = BY_NAME["gemm"].attrs
    bounds = []
    for source, target, activation in ((0, 3, 1), (3, 2, 0)):
        shape, strides = (width, width), (width, 1)
        place = [NativeOperand(i, 64, "f32", shape, strides) for i in (source, 1, target)]
        attrs = {"transpose_a": 0, "transpose_b": 0, "activation": activation, "alpha": 1.0}
        operands = [*place[:2], None, None, place[2]]
        bound = native_library().bind(20, 1, blob.pack(attrs), operands, 4)
        assert isinstance(bound, BoundCall)
        bounds.append(bound)
    return native_library().program(bounds)


@pytest.mark.parametrize("width", [20, 200])
def test_one_program_runs_on_many_addresses_from_several_threads(width: int) -> None:
    program = gemm_chain(width)

    def run(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        buffers = torch.randn(4, 16 + width * width, generator=generator)
        x, w, y = (buffers[i, 16:].view(width, width) for i in range(3))
        expected = torch.relu(x.double() @ w.double()) @ w.double()
        for _ in range(20):
            y.zero_()
            program.run(addresses([buffers[i].data_ptr() for i in range(4)]), 1 + seed % 2)
        return bool(((y - expected).abs() <= 1e-5 * expected.abs().max()).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(12)))


def test_threads_of_torch_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    a, y = torch.ones(300, 300), torch.empty(300, 300)
    native_call("gemm", {}, [a, a, None, None], [y], threads=2)
    assert torch.get_num_threads() == before
    assert torch.equal(y, a @ a)


def test_a_refusal_is_an_error_of_the_test_call() -> None:
    whole = torch.ones(2, 2, dtype=torch.int64)
    with pytest.raises(ExecError, match="gemm: operands are not all"):
        native_call("gemm", {}, [whole, whole, None, None], [whole])
