from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clean_process import ranks
from tests.comm.message_rank import SIZE

SCRIPT = "from tests.comm.message_rank import main\nmain()\n"


@pytest.mark.workers
@pytest.mark.timeout(180)
def test_four_ranks_run_the_table(tmp_path: Path) -> None:
    done = ranks(SCRIPT, tmp_path, count=SIZE)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == SIZE
    for report in reports:
        assert report["wrong"] == []
        assert report["busy"] < 0.3, "waiting for a message must not use the processor"
