"""What slots do in which order."""

from __future__ import annotations

from shardwright.engine.agenda import Entry, agenda, entries, is_training
from shardwright.pipeline import Pipeline
from tests.runtime.linear_step import linear_step
from tests.runtime.sketch import chain


def told(pipeline: Pipeline, slot: str) -> str:
    """Turns on lines: the number of the action, the microbatch, the supertasks."""
    lines = []
    for turn in agenda(pipeline, slot):
        when = "-" if turn.microbatch is None else turn.microbatch
        lines.append(f"{turn.action} {when} {' '.join(entry.task for entry in turn.entries)}")
    return "\n".join(lines)


def test_a_model_has_one_turn() -> None:
    pipeline = chain(2)
    assert not is_training(pipeline)
    assert told(pipeline, "d1") == "0 - recv.y0@d1 d1.0"
    assert entries(agenda(pipeline, "d1")) == [Entry("recv.y0@d1", "y0@d1"), Entry("d1.0")]


def test_a_backward_that_is_not_split_has_its_weight_gradients_behind_it() -> None:
    pipeline = linear_step("1f1b", microbatches=2)
    assert is_training(pipeline)
    assert told(pipeline, "d0") == (
        "1 0 F0.0 send.h1.0@d1\n"
        "2 1 F0.0 send.h1.0@d1\n"
        "3 0 recv.dh0.0@d0\n"
        "3 0 W0.0\n"
        "4 1 recv.dh0.0@d0\n"
        "4 1 W0.0\n"
        "5 - U0.0"
    )
    assert told(pipeline, "d1") == (
        "1 0 recv.h1.0@d1 F1.0 loss.0\n"
        "2 0 B1.0 send.dh0.0@d0\n"
        "2 0 W1.0\n"
        "3 1 recv.h1.0@d1 F1.0 loss.0\n"
        "4 1 B1.0 send.dh0.0@d0\n"
        "4 1 W1.0\n"
        "5 - U1.0 total"
    )
    assert entries(agenda(pipeline, "d1"))[0] == Entry("recv.h1.0@d1", "h1.0@d1", 1, 0)


def test_weight_gradients_come_when_the_schedule_says() -> None:
    pipeline = linear_step("zb-h1", microbatches=2)
    tasks = [entry.task for entry in entries(agenda(pipeline, "d0"))]
    assert tasks.index("W0.0") > tasks.index("recv.dh0.0@d0")
    assert tasks.count("W0.0") == 2
    numbers = [turn.action for turn in agenda(pipeline, "d0")]
    assert numbers == sorted(set(numbers)), "each weight gradient is an action of its own"
