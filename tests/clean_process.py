"""Commands, each in a process of its own that has nothing of this one's environment.

Commands of Python are forked from a process that has imported torch, and nothing of shardwright:
to import torch anew takes longer than what most of them do.
"""

import contextlib
import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
BESIDE_PATH = ("HOME", "LANG", "MKL_CBWR", "SHARDWRIGHT_CACHE", "XDG_CACHE_HOME")
"""What is handed on: where caches are, and how numbers round."""
SECONDS = 100
"""How long a command may take."""


def run_cleanly(
    *command: str, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of the Python that runs the tests; ``python`` and ``shardwright`` are its."""
    folder = folder or Path.cwd()
    environment = _environment() | variables
    if command[0] in ("python", "shardwright"):
        return _server(os.getpid()).run(command, folder, environment)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def run_program(
    program: str, *arguments: str, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the text of a program, which may import the tests."""
    command = ("python", "-c", program, *arguments)
    return run_cleanly(*command, folder=folder, PYTHONPATH=str(ROOT), **variables)


def printed_by(*command: str, folder: Path | None = None) -> str:
    """What a command prints that succeeds."""
    done = run_cleanly(*command, folder=folder)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


RANKS = """
import os, runpy, socket, sys

count = int(sys.argv.pop(1))
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
os.environ.update(WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
ranks = []
while len(ranks) < count and (not ranks or ranks[-1]):
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(len(ranks))
    ranks.append(os.fork())
if ranks[-1]:
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ranks(
    script: str, folder: Path, *arguments: str, count: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run a script, which may import the tests, as torchrun runs ranks: by their variables."""
    path = folder / "script.py"
    path.write_text(script)
    return run_program(RANKS, str(count), str(path), *arguments, folder=folder)


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in BESIDE_PATH if name in os.environ} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


class ForkServer:
    """A process with torch that forks for a command at a time, and says how it ended."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
            process_group=0,
        )

    def run(
        self, command: tuple[str, ...], folder: Path, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with its arguments, or a script beside it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory() as name, self._limited():
            said = [Path(name, stream) for stream in ("stdout", "stderr")]
            request = [command, str(folder), environment, *map(str, said)]
            self.process.stdin.write(f"{json.dumps(request)}\n")
            self.process.stdin.flush()
            status = self.process.stdout.readline()
            assert status, f"{' '.join(command)} took longer than {SECONDS} s"
            texts = [path.read_text() for path in said]
            return subprocess.CompletedProcess(command, int(status), *texts)

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        timer = threading.Timer(SECONDS, self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill(self) -> None:
        _server.cache_clear()
        os.killpg(self.process.pid, signal.SIGKILL)


@cache
def _server(tester: int) -> ForkServer:
    """The server of a process of tests, started when it is first needed."""
    return ForkServer()


def serve() -> None:
    """Fork for each command; the process of a command returns with what it shall run."""
    gc.disable()
    import torch._dynamo  # noqa: F401 (as torch's optimizers do when they are made)

    gc.freeze()
    gc.enable()
    while request := sys.stdin.readline():
        command, folder, environment, *said = json.loads(request)
        if not (pid := os.fork()):
            _enter(folder, environment, *said)
            _run(command)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _enter(folder: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "PYTHONPATH" in environment:
        sys.path[1:1] = environment["PYTHONPATH"].split(os.pathsep)
    for number, path in enumerate((os.devnull, stdout, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)


def _run(command: list[str]) -> None:
    """As Python begins: with a program after ``-c``, or a file."""
    name, *arguments = command
    if name == "python" and arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    if name != "python":
        arguments = [str(shutil.which(name)), *arguments]
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent.absolute())
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve()
