"""Mutation of pipeline files: a mutant is refused, or runs as another program that is legal.

    python -m tests.pipeline.mutation --count 20000 --seed 0

Each mutant is run by a worker process, so that one that crashes or hangs is counted and named by
its number; ``--seed N --count 1 --show`` prints what it was. What ran is another legal program if a
naive interpreter, which knows nothing of the package, makes the same of the file; calls of lowered
files, if native kernels and torch's make the same of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60.0
"""A mutant that takes longer hangs; a good file takes a twentieth of a second."""
MEMORY = 8 << 30
GOOD = ("refused", "legal")


# --- one mutant, in a worker -------------------------------------------------------------------


def judge(folder: Path, seed: int) -> dict[str, Any]:
    """What becomes of the mutant of this number."""
    from shardwright.errors import ShardwrightError
    from tests.pipeline.mutants import mutant, run

    spoiled = mutant(folder, seed)
    told: dict[str, Any] = {"seed": seed, "subject": spoiled.subject, "what": spoiled.what}
    try:
        results = run(folder, spoiled.data)
    except ShardwrightError as error:
        return {**told, "verdict": "refused", "why": f"{type(error).__name__}: {error}"[:300]}
    except BaseException:
        return {**told, "verdict": "raw error", "why": traceback.format_exc()[-1500:]}
    if b'"dfg"' in spoiled.data:
        values = [[*map(float, r.flatten())] for r in results]
        return {**told, "verdict": "ran", "values": values}
    return {**told, **_interpreted(folder, spoiled.data, results)}


def _interpreted(folder: Path, data: bytes, results: list[Any]) -> dict[str, Any]:
    import torch

    from tests.pipeline.interpreter import interpret
    from tests.pipeline.mutants import inputs

    rate = torch.tensor(1e-2, dtype=torch.float64)
    calls = [{"x": inputs(k), "lr": rate} for k in range(2)]
    try:
        with torch.no_grad():
            expected = interpret(data, folder, calls)
    except Exception:
        return {"verdict": "believed", "why": traceback.format_exc()[-600:]}
    pairs = [*zip(results, expected, strict=False)]
    same = len(results) == len(expected) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.allclose(a, b, 1e-5, 1e-6, equal_nan=True)
        for a, b in pairs
    )
    if same:
        return {"verdict": "legal"}
    return {"verdict": "other result", "why": f"{results} and {expected}"[:600]}


def work(folder: Path) -> None:
    """Judge the mutants whose numbers come in, one a line, and print what became of them."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
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
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "SHARDWRIGHT_NATIVE": "1" if self.native else "0",
            },
        )

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@dataclass
class Tally:
    """How many mutants became what, and those that became what they must not."""

    verdicts: Counter[str]
    failures: list[dict[str, Any]]

    @property
    def refused(self) -> float:
        """Of those that are no legal program, the part that is refused."""
        wrong = sum(self.verdicts.values()) - self.verdicts["legal"]
        return self.verdicts["refused"] / wrong if wrong else 1.0


def mutate(first: int, count: int) -> Tally:
    """Judge the mutants of these numbers."""
    from tests.pipeline.mutants import subjects

    tally = Tally(Counter(), [])
    with tempfile.TemporaryDirectory() as name:
        subjects(Path(name))
        workers = [Worker(Path(name), native) for native in (True, False)]
        try:
            for seed in range(first, first + count):
                found = workers[0].judge(seed)
                if found["verdict"] == "ran":
                    found = _compared(found, workers[1].judge(seed))
                tally.verdicts[found["verdict"]] += 1
                if found["verdict"] not in GOOD:
                    tally.failures.append(found)
                    print(json.dumps(found), flush=True)
        finally:
            for worker in workers:
                worker.close()
    return tally


def _compared(native: dict[str, Any], torch_s: dict[str, Any]) -> dict[str, Any]:
    """Whether both ways of computing a lowered file give the same."""
    import torch

    if torch_s["verdict"] != "ran":
        return {**torch_s, "verdict": "other result", "why": f"native ran; {torch_s['why']}"}
    pairs = [*zip(native["values"], torch_s["values"], strict=False)]
    same = len(native["values"]) == len(torch_s["values"]) and all(
        len(a) == len(b)
        and torch.allclose(torch.tensor(a), torch.tensor(b), 1e-4, 1e-5, equal_nan=True)
        for a, b in pairs
    )
    why = f"{native.pop('values')} and {torch_s['values']}"[:600]
    return {**native, "verdict": "legal" if same else "other result", "why": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="judge here, and print all of it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
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
    print(
        f"mutants {asked.seed} to {asked.seed + asked.count - 1} in "
        f"{time.monotonic() - start:.0f} s: {counts}; of those that are no legal program "
        f"{tally.refused:.2%} are refused"
    )
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
