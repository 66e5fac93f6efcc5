import pytest

from shardwright.errors import ScheduleError
from shardwright.schedules import KINDS, make_schedule


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("gpipe", (0, 1, 2)),
        ("1f1b", (0, 1, 2)),
        ("interleaved", (0, 1, 2, 0, 1, 2)),
        ("zb-h1", (0, 1, 2)),
        ("zb-v", (0, 1, 2, 2, 1, 0)),
    ],
)
def test_placements_of_the_kinds(kind: str, placement: tuple[int, ...]) -> None:
    assert make_schedule(kind, ranks=3, microbatches=4).placement == placement


def test_a_schedule_tells_the_stages_of_a_rank() -> None:
    schedule = make_schedule("zb-v", ranks=3, microbatches=1)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert schedule.stages == 6


def test_only_zero_bubble_has_weight_gradients_of_their_own() -> None:
    works = {kind: make_schedule(kind, ranks=2, microbatches=1).works for kind in KINDS}
    assert {kind for kind in works if "W" in works[kind]} == {"zb-h1", "zb-v"}


def test_an_action_reads_as_a_phrase() -> None:
    assert str(make_schedule("gpipe", ranks=2, microbatches=3).actions[1][4]) == "B1 of stage 1"


@pytest.mark.parametrize(
    ("kind", "numbers", "message"),
    [
        ("2f2b", {}, "no schedule is called '2f2b'; there are gpipe, 1f1b, interleaved"),
        ("1f1b", {"ranks": 0}, "1f1b with ranks=0; at least 1 is needed"),
        ("gpipe", {"microbatches": 0}, "gpipe with microbatches=0; at least 1"),
        ("interleaved", {"chunks": 0}, "interleaved with chunks=0; at least 1"),
        ("1f1b", {"chunks": 2}, "1f1b has 1 stages a rank, not 2; leave chunks out, or take inter"),
        ("zb-v", {"chunks": 3}, "zb-v has 2 stages a rank, not 3"),
    ],
)
def test_what_a_kind_does_not_have_is_refused(
    kind: str, numbers: dict[str, int], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_schedule(kind, **({"ranks": 2, "microbatches": 2} | numbers))
