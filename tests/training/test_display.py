import io

from rich.console import Console

from shardwright.training.logs import StepReport
from shardwright.training.options import Display


def report(step: int, **more: object) -> StepReport:
    given = {"numbers": {"loss": 2.0, "accuracy": 0.25}, "rates": {"lr": 0.001}, "seconds": 0.0125}
    return StepReport(step, 0, 2.0, samples=8, **(given | more))  # type: ignore[arg-type]


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200), steps=3, interval=0)
    display.note("resumed from step_000000")
    display.step(report(1))
    display.step(report(2, evaluation={"loss": 1.5}, tokens=1000))
    display.close()
    assert out.getvalue().splitlines() == [
        "resumed from step_000000",
        "step 1/3  epoch 0  loss 2  accuracy 0.25  lr 0.001  time 12.5 ms  samples/s 640",
        "step 2/3  epoch 0  loss 2  accuracy 0.25  lr 0.001  time 12.5 ms  tokens/s 80,000"
        "  evaluation loss 1.5",
    ]


def test_first_last_and_evaluated_steps_are_always_shown() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200), interval=1000)
    for step in range(1, 8):
        display.step(report(step, evaluation={"loss": 1.0} if step == 4 else None))
    display.close()
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1", "4", "7"]


def test_a_table_in_a_terminal() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=120, force_terminal=True, color_system=None))
    for step in range(1, 15):
        display.step(report(step, memory={"d0": 2_000_000}))
    display.step(report(15, evaluation={"loss": 1.5}))
    display.close()
    assert "accuracy" in out.getvalue()
    assert "evaluation after step 15: loss 1.5" in out.getvalue()
    assert "memory: d0 2" in out.getvalue()
