"""Mutation of pipeline files: a mutant is refused, or runs as another program that is legal.

    python -m tests.pipeline.mutation --count 20000 --seed 0

Pipeline files of all kinds are spoiled, and the parameter files beside them. Each mutant is run by
a worker process, so that one that crashes or hangs is counted and named by its number;
``--seed N --count 1 --show`` prints what it was. Most run in that process; of a hundred,
`PROCESSES` on processes of their own, and `FRESH` in a process that begins anew, on processes
too. What ran is another legal program if a naive interpreter, which knows nothing of the package,
makes the same of the file; lowered files are run by native kernels and by torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 120.0
"""A mutant that takes longer hangs; a good file takes a twentieth, a new process a few."""
MEMORY = 8 << 30
"""Of a process; what workers share is not among it."""
GOOD = ("refused", "legal")
PROCESSES, FRESH = 4, 1


def way_of(seed: int) -> str:
    """How a mutant is run."""
    if seed % 100 < FRESH:
        return "fresh"
    return "processes" if seed % 100 < FRESH + PROCESSES else "in process"


# --- one mutant, in a worker -------------------------------------------------------------------


def judge(good: Path, seed: int) -> dict[str, Any]:
    """What becomes of the mutant of this number."""
    from tests.pipeline.mutants import mutant

    spoiled = mutant(good, seed)
    told: dict[str, Any] = {
        "seed": seed,
        "subject": spoiled.subject,
        "what": spoiled.what,
        "way": way_of(seed),
    }
    file = spoiled.write(good, good / f"mutant-{os.getpid()}")
    found = _fresh(file) if way_of(seed) == "fresh" else outcome(file, way_of(seed) == "in process")
    results = found.pop("results", None)
    if results is not None:
        found |= _interpreted(file, results)
    return told | found


def outcome(file: Path, in_process: bool) -> dict[str, Any]:
    """What became of a file: a verdict, or results."""
    from shardwright.errors import ShardwrightError
    from tests.pipeline.mutants import run

    try:
        return {"results": run(file, in_process=in_process)}
    except ShardwrightError as error:
        why = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        return {"verdict": "refused", "why": "; ".join(why)[:300], "error": type(error).__name__}
    except BaseException:
        return {"verdict": "raw error", "why": traceback.format_exc()[-1500:]}


def _fresh(file: Path) -> dict[str, Any]:
    """What becomes of it in a process that begins anew."""
    import torch

    command = [sys.executable, "-m", "tests.pipeline.mutation", "--alone", str(file)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS - 10)
    except subprocess.TimeoutExpired:
        return {"verdict": "hang", "why": "a process that began anew"}
    if process.returncode:
        return {"verdict": "crash", "why": f"{process.returncode}: {process.stderr[-1500:]}"}
    found: dict[str, Any] = torch.load(file.with_suffix(".found"), weights_only=True)
    return found


def _interpreted(file: Path, results: list[Any]) -> dict[str, Any]:
    import torch

    from tests.pipeline.interpreter import interpret
    from tests.pipeline.mutants import inputs

    rate = torch.tensor(1e-2, dtype=torch.float64)
    calls = [{"x": inputs(k), "lr": rate} for k in range(2)]
    data = file.read_bytes()
    try:
        with torch.no_grad():
            expected = interpret(data, file.parent, calls)
    except Exception:
        return {"verdict": "believed", "why": traceback.format_exc()[-600:]}
    halves = b"f16" in data.replace(b"\\", b"")
    relative = 2e-2 if halves else 1e-4 if b'"dfg"' in data else 1e-5
    pairs = [*zip(results, expected, strict=False)]
    same = len(results) == len(expected) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.allclose(a, b, relative, relative / 10, equal_nan=True)
        for a, b in pairs
    )
    if same:
        return {"verdict": "legal"}
    return {"verdict": "other result", "why": f"{results} and {expected}"[:600]}


def work(folder: Path) -> None:
    """Judge the mutants whose numbers come in, one a line, and print what became of them."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(judge(folder, int(line))), file=answers, flush=True)


# --- many of them ------------------------------------------------------------------------------


class Worker:
    """A process that judges; another takes its place when it dies or hangs."""

    def __init__(self, folder: Path, native: bool) -> None:
        self.folder, self.native = folder, native
        self.process: subprocess.Popen[str] | None = None

    def judge(self, seed: int) -> dict[str, Any]:
        """What becomes of a mutant."""
        if self.process is None:
            self.process = self._started()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        status = self.process.wait() if ready else None
        self.close()
        verdict = "hang" if status is None else "crash"
        return {"seed": seed, "verdict": verdict, "why": f"status {status}"}

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.mutation", "--worker", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "SHARDWRIGHT_NATIVE": "1" if self.native else "0",
            },
        )

    def close(self) -> None:
        """End the process, and those that it started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None


@dataclass
class Tally:
    """How many mutants became what, and those that became what they must not."""

    verdicts: Counter[str] = field(default_factory=Counter)
    by_subject: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_way: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, found: dict[str, Any]) -> None:
        """One more."""
        verdict = found["verdict"]
        self.verdicts[verdict] += 1
        self.by_subject[found.get("subject", "?"), verdict] += 1
        self.by_way[found.get("way", "?"), verdict] += 1
        self.errors.update([found["error"]] if "error" in found else [])
        if verdict not in GOOD:
            self.failures.append(found)
            print(json.dumps(found), flush=True)

    @property
    def refused(self) -> float:
        """Of those that are no legal program, the part that is refused."""
        wrong = sum(self.verdicts.values()) - self.verdicts["legal"]
        return self.verdicts["refused"] / wrong if wrong else 1.0


def mutate(first: int, count: int) -> Tally:
    """Judge the mutants of these numbers."""
    from tests.pipeline.mutants import subjects

    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        subjects(Path(name))
        workers = [Worker(Path(name), native) for native in (True, False)]
        try:
            for seed in range(first, first + count):
                found = workers[0].judge(seed)
                if found["verdict"] == "legal" and found["subject"].startswith("lowered"):
                    found = workers[1].judge(seed)
                    found |= {} if found["verdict"] == "legal" else {"kernels": "torch's"}
                tally.add(found)
        finally:
            for worker in workers:
                worker.close()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="judge here, and print all of it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        import torch

        torch.save(outcome(asked.alone, in_process=False), asked.alone.with_suffix(".found"))
        return
    if asked.worker:
        work(asked.worker)
        return
    if asked.show:
        from tests.pipeline.mutants import mutant, subjects

        with tempfile.TemporaryDirectory() as name:
            subjects(Path(name))
            print(mutant(Path(name), asked.seed))
            print(judge(Path(name), asked.seed))
        return
    start = time.monotonic()
    tally = mutate(asked.seed, asked.count)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally.verdicts.most_common())
    for each in (tally.by_subject, tally.by_way):
        print(", ".join(f"{a}: {count} {b}" for (a, b), count in sorted(each.items())))
    print(", ".join(f"{count} {error}" for error, count in tally.errors.most_common()))
    print(
        f"mutants {asked.seed} to {asked.seed + asked.count - 1} in "
        f"{time.monotonic() - start:.0f} s: {counts}; of those that are no legal program "
        f"{tally.refused:.2%} are refused"
    )
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
