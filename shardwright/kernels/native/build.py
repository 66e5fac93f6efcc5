"""Builds the native kernels on the machine where they run, once.

A library's folder in the cache is named by everything that it depends on (sources, flags, compiler,
processor, torch), so that it is never stale; it is written aside and renamed, so that it is there
whole or not at all; processes that build at once wait for the first. The cache is
``$SHARDWRIGHT_CACHE``, else ``$XDG_CACHE_HOME/shardwright``, else ``~/.cache/shardwright``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwright.atomic import cache_folder, replacing
from shardwright.errors import ExecError

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    # What kernels do not look at; NaN and inf keep their meaning, and so do denormals.
    "-fno-math-errno",
    "-fno-trapping-math",
)
LAST_LINES = 12
"""How much of a failing compiler's output an error repeats."""


def find_compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: ``$CXX``, else g++, else clang++; None where none is."""
    asked = tuple(shlex.split(os.environ.get("CXX", "")))
    for command in [asked] if asked else [(name,) for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return (path, *command[1:])
    return None


def built_library() -> Path:
    """The library's path; it is built where the cache lacks it.

    Raises ExecError where there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ExecError(
            f"no C++ compiler: $CXX names none, and PATH has neither {' nor '.join(COMPILERS)}; "
            "install one of them"
        )
    try:
        base = [*compiler, *FLAGS, _version(compiler), _processor(), torch.__version__]
        library = cache_folder() / "native" / _digest(base, _files("*")) / "kernels.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with _alone(library.parent / "lock"):
                if not library.exists():
                    _say(compiler, library)
                    _build(compiler, base, library)
        return library
    except OSError as error:
        raise ExecError(f"the native kernels cannot be built: {error}") from error


def _say(compiler: tuple[str, ...], library: Path) -> None:
    """What takes so long, and that it does so once."""
    print(
        f"shardwright: compiling native kernels with {Path(compiler[0]).name}, once on this "
        f"machine, which takes a minute or two; kept in {library.parent.parent}",
        file=sys.stderr,
        flush=True,
    )


def _build(compiler: tuple[str, ...], base: list[str], library: Path) -> None:
    """All sources, as many at a time as there are cores, then one library."""
    objects = library.parent.parent / "objects"
    objects.mkdir(exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.stem}-{_digest(base, [source, *_files('*.h')])}.o"
        if not target.exists():
            with replacing(target) as aside:
                _run([*compiler, *FLAGS, "-c", str(source), "-o", str(aside)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile_one, _files("*.cpp")))
    with replacing(library) as aside:
        _run([*compiler, *FLAGS, "-shared", *map(str, compiled), "-o", str(aside)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).splitlines()[-LAST_LINES:])
        raise ExecError(
            f"{shlex.join(command)} failed with code {done.returncode}; name another compiler in "
            f"$CXX if this one is not fit for it:\n{said}"
        )


def _files(pattern: str) -> list[Path]:
    return sorted(p for p in SOURCES.glob(pattern) if p.suffix in (".cpp", ".h"))


def _digest(words: Iterable[str], files: Iterable[Path]) -> str:
    """A name for these words and the names and contents of these files."""
    found = hashlib.sha256()
    for word in words:
        found.update(word.encode() + b"\0")
    for file in files:
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:20]


def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout


def _processor() -> str:
    """What ``-march=native`` looks at: a cache may lie on a disk that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = {line.split(":")[0].strip(): line for line in lines if ":" in line}
    names = ("vendor_id", "cpu family", "model", "flags", "Features")
    return "\n".join([platform.machine(), *(told[name] for name in names if name in told)])


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Only one process at a time is in the block."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
