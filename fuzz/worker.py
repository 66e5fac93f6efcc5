"""A process that goes ways: a line of JSON with seed and ways in, a line for each way out.

A crash or a hang is seen by whoever started it, who knows which way was begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fuzz.case import Case
from fuzz.grammar import Program, draw
from fuzz.ways import WAYS, outcome


def chosen(case: Case, share: float) -> list[str]:
    """The ways that a program goes: all that fit, each with its share of the chance."""
    chance = random.Random(f"chosen {case.program.seed}")
    drawn = {name: chance.random() for name in WAYS}
    names = [name for name, way in WAYS.items() if drawn[name] < way.share * share]
    files = [name for name in names if "fresh" in name]
    names = [name for name in names if name not in files[1:]]  # a folder has one file
    return [name for name in names if WAYS[name].fits(case)]


def go(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each way's beginning and end."""
    text = request.get("text")
    if text is None:
        program = draw(request["seed"])
    else:
        program = Program(request["seed"], text, facts_of(text))
    case = Case(program, Path(request["folder"]) / str(request["seed"]))
    try:
        with torch.no_grad():
            case.expected  # noqa: B018
        if case.facts["trains"]:
            case.eager  # noqa: B018
        names = [name for name in request.get("ways", ()) if WAYS[name].fits(case)]
        if "ways" not in request:
            names = chosen(case, request.get("share", 1.0))
    except Exception as error:
        yield {"way": "eager", "kind": "invalid", "reason": f"{type(error).__name__}: {error}"}
        return
    for name in names:
        yield {"way": name, "kind": "begun"}
        begun = time.perf_counter()
        found = outcome(name, case)
        taken = time.perf_counter() - begun
        yield {"way": name, "kind": found.kind, "reason": found.reason, "seconds": taken}


def facts_of(text: str) -> dict[str, Any]:
    """What a program's text says of itself."""
    line = next(line for line in text.splitlines() if line.startswith("FACTS = "))
    return dict(eval(line.removeprefix("FACTS = ")))


def main() -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what programs print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            for answer in go(request):
                answers.write(json.dumps(answer) + "\n")
        answers.write(json.dumps({"kind": "done"}) + "\n")


if __name__ == "__main__":
    main()
