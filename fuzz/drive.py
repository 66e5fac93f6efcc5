"""Drives processes that go ways, so that a crash or a hang is one program's failure."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIMIT = 90.0
"""Seconds that one way may take on a busy machine."""
PROGRAMS = 60
"""How many programs a process goes through before another takes its place."""


class Child:
    """A process that answers requests; started when first asked, and anew when it is gone."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.asked = 0

    def ask(self, request: str, limit: float = LIMIT) -> Iterator[dict[str, Any]]:
        """The answers; where it dies or stands still, a failure of the way that it had begun."""
        process = self._alive()
        assert process.stdin is not None
        process.stdin.write(f"{request}\n")
        process.stdin.flush()
        way = "drawing"
        while True:
            try:
                line = self.lines.get(timeout=limit)
            except queue.Empty:
                process.kill()
                self.close()
                yield {"way": way, "kind": "failed", "reason": f"hung for {limit:.0f} s"}
                return
            if line is None:
                status = self.close()
                yield {"way": way, "kind": "failed", "reason": f"crashed with status {status}"}
                return
            answer = json.loads(line)
            if answer["kind"] == "done":
                return
            way = answer["way"]
            yield answer

    def _alive(self) -> subprocess.Popen[str]:
        if self.process is not None and self.asked >= PROGRAMS:
            self.close()
        if self.process is None:
            self.process = self._start()
        self.asked += 1
        return self.process

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment.setdefault("MKL_CBWR", "AUTO")
        process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.asked, self.lines = 0, queue.Queue()
        self.reader = threading.Thread(target=_read, args=(process, self.lines), daemon=True)
        self.reader.start()
        return process

    def close(self) -> int:
        """End the process; gives its status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        status = process.wait()
        self.reader.join()
        process.stdout.close()
        return status


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


@dataclass
class Tally:
    """What came of programs and ways."""

    programs: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    right: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    failed: list[tuple[int, str, str]] = field(default_factory=list)
    invalid: list[tuple[int, str]] = field(default_factory=list)

    def add(self, seed: int, answer: dict[str, Any]) -> None:
        """Count the end of a way."""
        kind, way, reason = answer["kind"], answer["way"], answer.get("reason", "")
        if kind == "invalid":
            self.invalid.append((seed, reason))
            return
        self.ways[way] += 1
        self.seconds[way] += answer.get("seconds", 0.0)
        if kind == "right":
            self.right += 1
        elif kind == "refused":
            self.refused.setdefault(shortened(reason), []).append((seed, way))
        elif kind == "failed":
            self.failed.append((seed, way, reason))

    def __str__(self) -> str:
        lines = [
            f"{self.programs} programs, {sum(self.ways.values())} ways gone: {self.right} right, "
            f"{sum(map(len, self.refused.values()))} refused, {len(self.failed)} failed; "
            f"{len(self.invalid)} programs that eager does not run"
        ]
        for reason, cases in sorted(self.refused.items(), key=lambda item: -len(item[1])):
            seeds = sorted({seed for seed, _ in cases})
            lines.append(f"  refused {len(cases):4}: {reason}  (seeds {_some(seeds)})")
        lines += [f"  not run by eager: seed {seed}, {why}" for seed, why in self.invalid]
        for seed, way, reason in self.failed:
            lines.append(f"  FAILED seed {seed}, {way}: {reason}")
        return "\n".join(lines)


def shortened(reason: str) -> str:
    """A reason without what differs between programs of one defect."""
    line = reason.split("\n")[0]
    line = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`|%[\w.]+", "…", line)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?|\[[^\]]*\]", "#", line)[:150]


def _some(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds[:5])) + (", ..." if len(seeds) > 5 else "")


def drive(
    requests: Iterable[dict[str, Any]],
    *,
    processes: int = 1,
    told: Callable[[int, dict[str, Any]], None] = lambda seed, answer: None,
) -> Tally:
    """Go all ways of all programs; files that a process wrote are run by another."""
    tally, lock = Tally(), threading.Lock()
    remaining = iter(requests)

    def go(folder: Path) -> None:
        worker, fresh = Child("fuzz.worker"), Child("fuzz.fresh")
        while True:
            with lock:
                request = next(remaining, None)
            if request is None:
                break
            seed = request["seed"]
            written = folder / str(seed)
            answers = list(worker.ask(json.dumps({**request, "folder": str(folder)})))
            for place, answer in enumerate(answers):
                if "fresh" in answer["way"] and answer["kind"] == "right":
                    found = fresh.ask(json.dumps({"way": answer["way"], "folder": str(written)}))
                    answers[place : place + 1] = found
            with lock:
                tally.programs += 1
                for answer in answers:
                    if answer["kind"] != "begun":
                        tally.add(seed, answer)
                        told(seed, answer)
            shutil.rmtree(written, ignore_errors=True)
        worker.close()
        fresh.close()

    with tempfile.TemporaryDirectory() as name:
        threads = [threading.Thread(target=go, args=(Path(name),)) for _ in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return tally
