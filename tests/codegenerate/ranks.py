"""Processes, one a slot, forked from one that has imported all that they need.

A job names a function of a module beside this file, ``prepare(job)``, which gives what is done by
each rank: a function from its rank to what it saves. The process that forks never runs a backward,
after which autograd cannot be used in a fork.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
SECONDS = 100


def results(module: str, job: Mapping[str, Any], slots: int, folder: Path) -> list[Any]:
    """What the ranks of a job save; ``job`` can be written as JSON."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    request = {**job, "module": module, "slots": slots, "folder": str(folder)}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    said = server.stdout.readline()
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert said == "done\n", "\n".join([said, *errors])
    return [torch.load(folder / f"{rank}.pt") for rank in range(slots)]


@cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [sys.executable, "-W", "error", __file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.communicate()


def _serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            said = _run(job)
        except Exception:
            said = traceback.format_exc().replace("\n", " | ")
        print(said, flush=True)


def _run(job: Mapping[str, Any]) -> str:
    module = importlib.import_module(f"tests.codegenerate.{job['module']}")
    work: Callable[[int], Any] = module.prepare(job)
    children = [_fork(job, work, rank) for rank in range(job["slots"])]
    deadline = time.monotonic() + SECONDS
    codes: dict[int, int] = {}
    while len(codes) < len(children) and time.monotonic() < deadline:
        for child in children:
            if child not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = found[1]
        if any(codes.values()):
            break
        time.sleep(0.01)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return "done" if len(codes) == len(children) and not any(codes.values()) else f"codes {codes}"


def _fork(job: Mapping[str, Any], work: Callable[[int], Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    folder = Path(job["folder"])
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meeting'}",
            rank=rank,
            world_size=job["slots"],
            timeout=timedelta(seconds=60),
        )
        torch.save(work(rank), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve()
