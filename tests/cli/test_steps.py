from io import StringIO

import pytest
from rich.console import Console

from shardwright.cli.steps import Steps


def console() -> Console:
    return Console(file=StringIO(), width=80)


def test_a_step_leaves_its_name_and_its_duration() -> None:
    steps = Steps(console())
    with steps.step("capture"):
        pass
    assert steps.console.file.getvalue().split()[0] == "capture"
    assert steps.console.file.getvalue().strip().endswith("s")


def test_a_failing_step_leaves_no_line() -> None:
    steps = Steps(console())
    with pytest.raises(ValueError, match="odd"), steps.step("capture"):
        raise ValueError("odd")
    assert "capture" not in steps.console.file.getvalue()


def test_quiet_steps_write_nothing() -> None:
    steps = Steps(console(), quiet=True)
    with steps.step("capture"):
        pass
    assert steps.console.file.getvalue() == ""
