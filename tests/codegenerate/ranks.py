"""Processes of a script, one a slot, with a limit of time."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SECONDS = 100


def results(script: str, job: Mapping[str, Any], slots: int, folder: Path) -> list[Any]:
    """What the processes of a script beside this file save, by rank."""
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "slots": slots, "folder": str(folder)}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(HERE / script), str(path), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(slots)
    ]
    try:
        said = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(slots)]
