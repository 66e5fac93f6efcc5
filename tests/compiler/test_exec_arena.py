"""Offsets: what lives at once lies apart, and the arena is hardly larger than it must be."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.memory.arena import ALIGNMENT, LiveRange, align, make_arena, peak_bytes

intervals = st.builds(
    lambda start, length, size: LiveRange(start, start + length, size),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 2000),
)


@given(st.lists(intervals, max_size=40))
def test_what_lives_at_once_lies_apart(drawn):
    arena = make_arena(drawn)
    placed = list(zip(drawn, arena.offsets, strict=True))
    for k, (a, at) in enumerate(placed):
        assert at % ALIGNMENT == 0
        assert at + a.size <= arena.size
        for b, there in placed[:k]:
            if a.start <= b.end and b.start <= a.end and a.size and b.size:
                assert at + a.size <= there or there + b.size <= at
    assert arena.size >= arena.peak


@given(st.lists(intervals, max_size=40))
def test_the_peak_is_that_of_the_fullest_call(drawn):
    living = [sum(align(i.size) for i in drawn if i.start <= t <= i.end) for t in range(70)]
    assert make_arena(drawn).peak == max(living)


@pytest.mark.parametrize("depth", [3, 40])
def test_a_forward_and_its_backward_fit_exactly(depth):
    """Activations that live until their gradients, and what lives between two calls."""
    kept = [LiveRange(k, 2 * depth - k, 100 * 64) for k in range(depth)]
    brief = [LiveRange(k, k + 1, (k % 3 + 1) * 640) for k in range(2 * depth)]
    arena = make_arena([*kept, *brief])
    assert arena.size <= 1.05 * arena.peak


def training_step(seed, depth=20):
    """Activations that live until their gradients, gradients until the update, and brief ones."""
    draws, end, found = random.Random(seed), 4 * depth, []
    for k in range(depth):
        for _ in range(draws.randint(1, 3)):
            found.append(LiveRange(2 * k, end - 2 * k, 64 * draws.randint(1, 60)))
        found.append(LiveRange(2 * k, 2 * k + 1, 64 * draws.randint(1, 80)))
        found.append(LiveRange(end - 2 * k - 1, end - 2 * k, 64 * draws.randint(1, 80)))
        found.append(LiveRange(end - 2 * k, end + 1, 64 * draws.randint(1, 30)))
    return found


def test_uneven_steps_fit_nearly_exactly():
    arenas = [make_arena(training_step(seed)) for seed in range(10)]
    assert max(arena.size / arena.peak for arena in arenas) <= 1.01
    assert sum(arena.size / arena.peak for arena in arenas) / len(arenas) <= 1.002


def test_holes_are_used_again_and_joined():
    first, second = LiveRange(0, 1, 640), LiveRange(0, 1, 640)
    wide = LiveRange(2, 3, 1280)
    arena = make_arena([first, second, wide])
    assert arena.size == 1280
    assert arena.offsets[2] == 0


def test_nothing_takes_nothing():
    assert make_arena([]) == ((), 0, 0)
    assert make_arena([LiveRange(0, 3, 0)]).size == 0
    assert peak_bytes([]) == 0
