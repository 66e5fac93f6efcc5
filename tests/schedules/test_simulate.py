"""Step times and memory against the formulas of the papers that the kinds come from."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedules import Action, Schedule, make_schedule, simulate
from tests.schedules.drawing import schedules

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 20)
DURATIONS = st.integers(1, 5)


@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICROBATCHES, DURATIONS, DURATIONS, DURATIONS)
def test_a_flush_costs_what_one_microbatch_takes_on_the_other_ranks(
    kind: str, ranks: int, microbatches: int, forward: int, backward: int, weight: int
) -> None:
    simulation = simulate(
        make_schedule(kind, ranks=ranks, microbatches=microbatches),
        forward=forward,
        backward=backward,
        weight=weight,
    )
    assert simulation.step_time == (microbatches + ranks - 1) * (forward + backward + weight)
    assert simulation.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(RANKS, MICROBATCHES, st.integers(1, 4), DURATIONS, DURATIONS)
def test_interleaving_divides_the_bubble_by_the_chunks(
    ranks: int, microbatches: int, chunks: int, forward: int, backward: int
) -> None:
    assume(microbatches >= ranks)
    schedule = make_schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    simulation = simulate(schedule, forward=forward, backward=backward, weight=0)
    assert simulation.step_time == (chunks * microbatches + ranks - 1) * (forward + backward)


@given(RANKS, MICROBATCHES, DURATIONS, DURATIONS, DURATIONS)
def test_zb_h1_waits_as_its_paper_says(
    ranks: int, microbatches: int, forward: int, backward: int, weight: int
) -> None:
    assume(microbatches >= ranks and forward <= backward)
    simulation = simulate(
        make_schedule("zb-h1", ranks=ranks, microbatches=microbatches),
        forward=forward,
        backward=backward,
        weight=weight,
    )
    work = microbatches * (forward + backward + weight)
    assert simulation.step_time == work + (ranks - 1) * (backward + max(forward - weight, 0))


@given(RANKS, MICROBATCHES)
def test_zb_v_waits_for_single_chunks_only(ranks: int, microbatches: int) -> None:
    assume(microbatches >= 2 * ranks - 1)
    simulation = simulate(make_schedule("zb-v", ranks=ranks, microbatches=microbatches))
    assert simulation.step_time == 6 * microbatches + ranks - 1


@given(RANKS, MICROBATCHES)
def test_peak_activations(ranks: int, microbatches: int) -> None:
    def peaks(kind: str) -> list[float]:
        schedule = make_schedule(kind, ranks=ranks, microbatches=microbatches)
        return list(simulate(schedule).peak_activations)

    everywhere = range(ranks)
    assert peaks("gpipe") == [microbatches for _ in everywhere]
    assert peaks("1f1b") == [min(microbatches, ranks - rank) for rank in everywhere]
    assert peaks("zb-h1") == [min(microbatches, ranks) for _ in everywhere]
    assert max(peaks("zb-v")) <= 2 * min(microbatches, ranks)


@given(RANKS, st.integers(1, 3), st.integers(2, 4))
def test_interleaving_holds_what_megatron_does(ranks: int, rounds: int, chunks: int) -> None:
    microbatches = rounds * ranks
    schedule = make_schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    assert list(simulate(schedule).peak_activations) == [
        min(chunks * microbatches, (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1)
        for rank in range(ranks)
    ]


@given(schedules(), st.integers(0, 3))
def test_actions_of_a_rank_follow_one_another_and_wait_for_what_they_need(
    schedule: Schedule, communication: int
) -> None:
    simulation = simulate(schedule, communication=communication)
    for actions in schedule.actions:
        times = [simulation.spans[action] for action in actions]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    for action, (start, _) in simulation.spans.items():
        if action.kind == "F" and action.stage > 0:
            sent = simulation.spans[Action("F", action.stage - 1, action.microbatch)][1]
            far = schedule.placement[action.stage] != schedule.placement[action.stage - 1]
            assert start >= sent + communication * far
    assert max(end for _, end in simulation.spans.values()) == simulation.step_time


def test_communication_delays_the_first_and_the_last_microbatch() -> None:
    schedule = make_schedule("gpipe", ranks=3, microbatches=4)
    assert simulate(schedule, communication=0.5).step_time == simulate(schedule).step_time + 4 * 0.5


def test_a_stage_may_take_longer_than_another() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    simulation = simulate(schedule, forward=[1, 3], backward=[1, 3], weight=[0, 0])
    assert simulation.busy == (8, 24)
    assert simulation.rank_bubbles == pytest.approx((1 - 8 / 26, 1 - 24 / 26))


def test_a_smaller_last_microbatch_takes_and_holds_less() -> None:
    schedule = make_schedule("gpipe", ranks=1, microbatches=3)
    simulation = simulate(schedule, sizes=[1, 1, 0.5])
    assert simulation.step_time == 2.5 * 3
    assert simulation.peak_activations == (2.5,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": [1, 2, 3]}, "3 forward durations for 2 stages"),
        ({"weight": []}, "0 weight durations for 2 stages"),
        ({"sizes": [1]}, "1 sizes for 4 microbatches"),
    ],
)
def test_too_few_durations_are_refused(arguments: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(make_schedule("1f1b", ranks=2, microbatches=4), **arguments)
