"""Programs that drive workers, as Pythons of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_at_once(programs: Sequence[str], *options: str) -> list[subprocess.CompletedProcess[str]]:
    """Run programs at the same time: most of it they spend with importing torch, on one core."""
    commands = [[sys.executable, *options, "-c", program] for program in programs]
    running = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        said = [driver.communicate(timeout=100) for driver in running]
    finally:
        for driver in running:
            driver.kill()
            driver.wait()
    return [
        subprocess.CompletedProcess(command, driver.returncode, *texts)
        for command, driver, texts in zip(commands, running, said, strict=True)
    ]
