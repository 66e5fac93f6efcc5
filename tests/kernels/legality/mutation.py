"""Lowered tasks of which something was changed, and what becomes of them.

    python -m tests.kernels.legality.mutation 0 50000 --sanitize

Each seed changes one to three things in a good task: a shape, dtype, stride, operand, call, byte of
attributes, argument of a generic call, one size throughout, or the contents of whole numbers. It is
refused in words, or runs: by native kernels, by torch's, and each call alone on operands of exactly
their size, between pages that may not be touched. With ``--sanitize`` the native kernels are
compiled by g++ with AddressSanitizer, and a process that it ends is told with its report and its
seed; with ``--avx512`` they are those of AVX-512, whose masked loads and stores the sanitizer does
not see, but the pages do. In the end stand what refused mutants, what ran, and which operators and
kernels it called. Exits with 1 where a seed did anything else than that.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.kernels.legality import tasks
from tests.kernels.legality.mutants import mutant
from tests.kernels.legality.outcome import outcome

SANITIZER = "g++ -fsanitize=address -fno-omit-frame-pointer -g1 -D_GLIBCXX_ASSERTIONS"
NARROW = " -mno-avx512f"
"""Without masked loads and stores, which the sanitizer does not see."""
PATIENCE = 300.0
"""Seconds after which a mutant hangs."""


def _work(first: int, end: int, corpus: Path) -> None:
    """The seeds of a slice, each told before and after it is tried."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = json.loads(corpus.read_text())
    tasks.texts = lambda: found  # type: ignore[assignment]
    for seed in range(first, end):
        print(f"try {seed}", flush=True)
        text, changes = mutant(seed)
        told: dict[str, Any] = {"changes": changes}
        try:
            told |= outcome(text, seed)._asdict()
        except Exception as error:
            told |= {"word": "raw error", "why": f"{type(error).__name__}: {error}"[:600]}
        print(f"end {json.dumps(told)}", flush=True)


def _slice(
    first: int, end: int, corpus: Path, compiler: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Seeds and what became of them, in processes that are replaced when they end or hang."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if compiler is not None:
        # The sanitizer looks for the thrower of exceptions as the process begins.
        names = ("libasan.so", "libstdc++.so.6")
        found = [
            subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
            for name in names
        ]
        environment |= {
            "CXX": compiler,
            "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0"
            ":max_allocation_size_mb=4096",
        }
    while first < end:
        command = [sys.executable, "-m", __spec__.name, str(first), str(end)]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*command, "--corpus", str(corpus)],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
            seed, ended = first - 1, True
            assert process.stdout is not None
            for line in _lines(process.stdout.fileno()):
                word, _, said = line.partition(" ")
                if word == "try":
                    seed, ended = int(said), False
                elif word == "end":
                    ended = True
                    yield seed, json.loads(said)
            process.kill()
            code = process.wait()
            errors.seek(0)
            report = errors.read()
        if not ended or code:
            seed = max(seed, first)
            hung = ended is False and code == -signal.SIGKILL
            word = "hang" if hung else "crash"
            yield seed, {"word": word, "why": f"code {code}\n{report[-6000:]}"}
        first = seed + 1


def _lines(file: int) -> Iterator[str]:
    """Lines of a pipe, until it ends or says nothing for too long."""
    kept = b""
    while select.select([file], [], [], PATIENCE)[0]:
        if not (read := os.read(file, 1 << 16)):
            return
        *whole, kept = (kept + read).split(b"\n")
        yield from (line.decode() for line in whole)


@dataclass
class Tally:
    """How many mutants became what, and what those that ran called."""

    words: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    called: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    bad: int = 0

    def add(self, told: Mapping[str, Any]) -> None:
        """One more."""
        word = told["word"]
        self.words[word] += 1
        self.bad += word in ("raw error", "crash", "hang")
        self.rules.update([told["refused_by"]] if told.get("refused_by") else [])
        self.called.update(set(told.get("called", ())))
        for name in set(told.get("changes", ())):
            self.changed[name] += 1
            self.ran[name] += word == "run"
        self.ran["a call by name"] += any("." in name for name in told.get("called", ()))

    def __str__(self) -> str:
        ran = ", ".join(f"{n} {self.ran[n]} of {self.changed[n]}" for n in sorted(self.changed))
        by_name = {name: count for name, count in self.called.items() if "." in name}
        kernels = {name: count for name, count in self.called.items() if "." not in name}
        return "\n".join(
            (
                f"became: {_counts(self.words)}",
                f"refused by: {_counts(self.rules)}",
                f"ran, of those with a change of: {ran}",
                f"ran with a call by name: {self.ran['a call by name']}",
                f"mutants that ran each kernel: {_counts(kernels)}",
                f"mutants that ran each operator by name: {_counts(by_name)}",
            )
        )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(counts).most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutants of lowered tasks.")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, help="the seed behind the last")
    parser.add_argument("--sanitize", action="store_true", help="kernels with AddressSanitizer")
    parser.add_argument("--avx512", action="store_true", help="and with those of AVX-512")
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.corpus is not None:
        _work(asked.first, asked.end, asked.corpus)
        return 0
    compiler = SANITIZER + ("" if asked.avx512 else NARROW) if asked.sanitize else None
    tally, begin = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "texts.json"
        corpus.write_text(json.dumps(tasks.texts()))
        for done, (seed, told) in enumerate(_slice(asked.first, asked.end, corpus, compiler), 1):
            tally.add(told)
            if "why" in told:
                print(f"seed {seed}: {told['word']}: {told['why']}", flush=True)
            if done % 1000 == 0 or seed + 1 == asked.end:
                spent = time.monotonic() - begin
                print(f"{done} mutants in {spent:.0f} s: {_counts(tally.words)}", flush=True)
    print(tally)
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
