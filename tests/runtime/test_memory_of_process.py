import subprocess
import sys

from shardwright.runtime.memory import process_peak

MEGA = 1 << 20
ASK = "from shardwright.runtime.memory import process_peak; print(process_peak())"


def test_a_peak_stays_when_memory_is_given_back():
    before = process_peak()
    held = b"x" * (before + 100 * MEGA)
    grown = process_peak()
    del held
    assert min(grown, process_peak()) > before + 90 * MEGA


def test_a_process_does_not_count_what_the_one_that_started_it_held():
    held = b"x" * (2000 * MEGA)
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert int(asked.stdout) < len(held) / 2
