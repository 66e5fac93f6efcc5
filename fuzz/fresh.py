"""Runs pipeline files that another process wrote, and knows nothing of the programs.

A line of JSON names a folder with a file and what that must give; another one answers.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch

import shardwright as sw
from fuzz.case import MismatchError, call, equal, loss_of


def run(folder: Path) -> None:
    """Load, check and run a file. Raises MismatchError and whatever goes wrong."""
    wanted = torch.load(folder / "expected.pt", weights_only=False)
    path = folder / "model.pipeline.json"
    sw.check(sw.Pipeline.load(path))
    if "call" in wanted:
        args, kwargs = wanted["call"]
        found = sw.run(path, *args, in_process=True, **kwargs)
        equal("output", found, wanted["expected"], wanted["tolerance"])
        return
    with sw.TrainingRunner(path, in_process=True) as session:
        step = partial(session.step, **wanted["rates"])
        losses = [loss_of(call(step, batch)) for batch in wanted["batches"]]
    equal("losses", losses, wanted["losses"], wanted["tolerance"])


def answer(request: dict[str, str]) -> dict[str, str]:
    """How it went."""
    kind, reason = "right", ""
    try:
        run(Path(request["folder"]))
    except MismatchError as error:
        kind, reason = "failed", f"wrong: {error}"
    except Exception as error:
        kind, reason = "failed", f"{type(error).__name__}: {error}"
    return {"way": request["way"], "kind": kind, "reason": reason}


def main() -> None:
    """Answer for each folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.write(json.dumps({"kind": "done"}) + "\n")


if __name__ == "__main__":
    main()
