"""The collectives of a device library. Their path is run over gloo in `test_distributed`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwright.comm import make_store

ROOT = Path(__file__).parents[2]
DEVICES = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(DEVICES < 2, reason=f"NCCL needs a device a rank; there are {DEVICES} here")
def test_nccl_runs_the_table() -> None:
    size = min(DEVICES, 4)
    store = make_store()
    command = [sys.executable, "-m", "tests.comm.cuda_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(store.fileno())],
            stdout=subprocess.PIPE,
            pass_fds=[store.fileno()],
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(size)
    ]
    try:
        printed = [process.communicate(timeout=100)[0] for process in ranks]
        assert [json.loads(text) for text in printed] == [[]] * size
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
        store.close()
