from hypothesis import given
from hypothesis import strategies as st

from shardwright.schedules import Schedule, format_schedule, make_schedule
from tests.schedules.drawing import schedules


def test_a_table_of_one_stage_a_rank() -> None:
    assert format_schedule(make_schedule("1f1b", ranks=2, microbatches=3)) == (
        """\
1f1b: ranks 2, stages a rank 1, microbatches 3

        0              5             10
rank 0 F0 F1  .  . B0 -- F2 B1 --  . B2 --
rank 1  . F0 B0 -- F1 B1 -- F2 B2 --  .  .

bubble            25.0% of 12 slots (25.0%, 25.0%)
peak activations  2, 1 (of one stage and one microbatch)
deadlock          impossible: one order of all 12 actions agrees with every rank's"""
    )


def test_a_wide_table_goes_on_below_with_stages_marked() -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=2)
    assert format_schedule(schedule, width=50, labels=["d0 d1", "d2 d3"]) == (
        """\
zb-v: ranks 2, stages a rank 2, microbatches 2

                  0                   5
d0 d1 (a=0 b=3) F0a F1a   . F0b B0b W0b F1b
d2 d3 (a=1 b=2)   . F0a F0b F1a F1b B0b W0b

                  7          10
d0 d1 (a=0 b=3) B1b W1b B0a W0a   . B1a W1a
d2 d3 (a=1 b=2) B0a W0a B1b W1b B1a W1a   .

bubble            14.3% of 14 slots (14.3%, 14.3%)
peak activations  3, 4 (of one stage and one microbatch)
deadlock          impossible: one order of all 24 actions agrees with every rank's"""
    )


def test_more_stages_than_letters_have_their_numbers() -> None:
    text = format_schedule(make_schedule("interleaved", ranks=1, microbatches=1, chunks=27))
    assert "F0.26" in text


@given(schedules(), st.integers(40, 200))
def test_rows_stay_within_the_width(schedule: Schedule, width: int) -> None:
    rows = [line for line in format_schedule(schedule, width=width).splitlines() if "rank " in line]
    assert all(len(line) <= width for line in rows[1:])
