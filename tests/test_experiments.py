"""What the experiments write of their runs: tables and plots."""

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks.experiments.figures import SUBJECTS, figure, markdown
from benchmarks.experiments.measurements import PYTORCH, Run

RUNS = [
    Run("ViT", PYTORCH, 1, 2000.0, "images", None, [2.0, 1.0], 0.5),
    Run("ViT", "one device", 1, 1000.0, "images", 4_000_000, [2.0, 1.0], 0.5),
    Run("ViT", "data 2", 2, 3000.0, "images", 2_000_000, [2.0, 1.001], 0.75),
]


@pytest.mark.parametrize(
    ("subject", "last"),
    [
        ("throughput", "| ViT | data 2 | 2 | 3,000 images/s | 1.50 |"),
        ("memory", "| ViT | data 2 | 2 | 2.00 MB | 0.50 |"),
        ("accuracy", "| ViT | data 2 | 2 | 0.7500 | 1.001000 | 1e-03 |"),
    ],
)
def test_a_table_has_a_row_a_run_against_pytorch_or_one_device(subject, last):
    lines = markdown(SUBJECTS[subject], RUNS).splitlines()
    assert lines[-1] == last
    assert len(lines) == 2 + len(RUNS)
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(("subject", "drawn"), [("throughput", 3), ("memory", 2)])
def test_a_bar_for_each_run_that_was_counted(subject, drawn):
    (panel,) = figure(SUBJECTS[subject], RUNS).axes
    assert panel.get_title() == "ViT"
    assert len(panel.patches) == drawn


def test_a_line_for_each_run():
    (panel,) = figure(SUBJECTS["accuracy"], RUNS).axes
    assert [len(line.get_ydata()) for line in panel.lines] == [2, 2, 2]
