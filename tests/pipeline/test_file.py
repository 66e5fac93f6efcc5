import msgspec
import pytest
from hypothesis import given

from shardwright.errors import ScheduleError
from shardwright.pipeline import Microbatches, ScheduleInfo, Training
from shardwright.pipeline.check_schedule import schedule_info, schedule_of
from shardwright.schedules import Schedule, make_schedule
from tests.schedules.drawing import schedules


@given(schedules())
def test_a_file_tells_the_same_schedule(schedule: Schedule) -> None:
    info = schedule_info(schedule, [[f"d{rank}"] for rank in range(schedule.ranks)])
    training = Training(microbatches=Microbatches(schedule.microbatches), schedule=info)
    read = msgspec.json.decode(msgspec.json.encode(training), type=Training)
    assert schedule_of(read) == schedule


def test_what_a_file_says() -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=4)
    assert msgspec.to_builtins(schedule_info(schedule, [["d0", "d1"], ["d2", "d3"]])) == {
        "kind": "zb-v",
        "ranks": 2,
        "chunks": 2,
        "placement": (0, 1, 1, 0),
        "slots": (("d0", "d1"), ("d2", "d3")),
    }


def training(**changes: object) -> Training:
    info = schedule_info(make_schedule("1f1b", ranks=2, microbatches=4), [["d0"], ["d1"]])
    changed: ScheduleInfo = msgspec.structs.replace(info, **changes)
    return Training(microbatches=Microbatches(4), schedule=changed)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (training(kind="pipedream"), r"training.schedule.kind is 'pipedream'; expected gpipe or"),
        (training(chunks=2), r"training.schedule.chunks: 1f1b has 1 stages a rank, not 2"),
        (training(placement=(1, 0)), r"training.schedule.placement is \[1, 0\]; expected \[0, 1\]"),
        (training(slots=(("d0",),)), r"training.schedule.slots is '1 lists'; expected 2, one a"),
        (Training(), r"training.schedule is missing: the file is not of a training step"),
        (Training(schedule=training().schedule), r"training.microbatches is missing"),
    ],
)
def test_a_wrong_key_is_named(wrong: Training, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_of(wrong)
