"""Commands, each in a process of its own that has nothing of this one's environment."""

import os
import subprocess
import sys
from pathlib import Path

BESIDE_PATH = ("HOME", "LANG", "MKL_CBWR", "SHARDWRIGHT_CACHE", "XDG_CACHE_HOME")
"""What is handed on: where caches are, and how numbers round."""


def run_cleanly(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of the Python that runs the tests; ``python`` and ``shardwright`` are its."""
    environment = {name: os.environ[name] for name in BESIDE_PATH if name in os.environ}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )


def printed_by(*command: str, folder: Path | None = None) -> str:
    """What a command prints that succeeds."""
    done = run_cleanly(*command, folder=folder)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
