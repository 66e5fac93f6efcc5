"""Runs pipeline files that another process wrote, and knows nothing of the programs.

Each line of standard input is a folder with a file and what it must give; a line of JSON answers.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch

import shardwright as sw
from fuzz.case import MismatchError, equal


def run(folder: Path) -> str:
    """Nothing, or what is wrong."""
    wanted = torch.load(folder / "expected.pt", weights_only=False)
    args, kwargs = wanted["call"]
    try:
        pipeline = sw.Pipeline.load(folder / "model.pipeline.json")
        sw.check(pipeline)
        found = sw.run(folder / "model.pipeline.json", *args, in_process=True, **kwargs)
        equal("output", found, wanted["expected"], wanted["tolerance"])
    except MismatchError as error:
        return f"wrong: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Answer for each folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        reason = run(Path(line.strip()))
        kind = "failed" if reason else "right"
        answers.write(json.dumps({"way": "fresh process", "kind": kind, "reason": reason}) + "\n")
        answers.write(json.dumps({"kind": "done"}) + "\n")


if __name__ == "__main__":
    main()
