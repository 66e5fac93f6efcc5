from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
RANKS = 4


@pytest.mark.workers
@pytest.mark.timeout(180)
def test_four_ranks_run_the_table() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.comm.message_rank", str(rank), str(store.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [process.communicate(timeout=120) for process in ranks]
        for rank, (out, err) in enumerate(printed):
            assert ranks[rank].returncode == 0, f"rank {rank}: {err}"
            report = json.loads(out)
            assert report["wrong"] == []
            assert report["busy"] < 0.3, "waiting for a message must not use the processor"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
