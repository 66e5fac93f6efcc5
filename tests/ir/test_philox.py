"""Philox against its authors' own test vectors, and words of slices against those of the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ir.dropout import philox, words_below

# kat_vectors of Random123: philox4x32, 10 rounds; counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000 00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("given_words", "expected"), VECTORS)
def test_known_answers(given_words: str, expected: str) -> None:
    *counter, k0, k1 = numbers(given_words)
    words = philox(tuple(torch.tensor([word]) for word in counter), (k0, k1))
    assert [int(word) for word in words] == numbers(expected)


@st.composite
def slices(draw: st.DrawFn) -> tuple[list[int], list[slice]]:
    """A shape and a slice of each of its dimensions, none empty."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    ends = [draw(st.integers(a + 1, size)) for a, size in zip(starts, shape, strict=True)]
    return shape, [slice(a, b) for a, b in zip(starts, ends, strict=True)]


def drawn(shape, *, offsets=None, whole=None, limit=1 << 31, seed=5, stream=1, step=3):
    return words_below(
        limit,
        shape,
        seed=seed,
        stream=stream,
        step=torch.tensor([step]),
        offsets=offsets or [0] * len(shape),
        whole_shape=whole or shape,
    )


@settings(deadline=None)
@given(slices(), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_slice_has_the_words_of_the_whole(
    case: tuple[list[int], list[slice]], seed: int, stream: int, step: int
) -> None:
    shape, ranges = case
    options = {"seed": seed, "stream": stream, "step": step}
    part = drawn(
        [r.stop - r.start for r in ranges],
        offsets=[r.start for r in ranges],
        whole=shape,
        **options,
    )
    assert torch.equal(part, drawn(shape, **options)[tuple(ranges)])


def test_what_is_worked_on_in_several_goes_is_the_same() -> None:
    shape = [300, 1000]  # more counters than fit into one go on a CPU
    assert torch.equal(
        drawn(shape), torch.cat([drawn([1, 1000], offsets=[i, 0], whole=shape) for i in range(300)])
    )


def test_every_word_counts() -> None:
    whole = drawn([64, 64])
    others = [
        drawn([64, 64], **change)
        for change in (
            {"seed": 6},
            {"seed": 5 + (1 << 32)},
            {"stream": 2},
            {"step": 4},
        )
    ]
    for other in others:
        assert 0.4 < (other == whole).double().mean() < 0.6


@pytest.mark.parametrize("limit", [0, 1 << 30, 3 << 30, 1 << 32])
def test_as_many_words_are_below_as_the_limit_says(limit: int) -> None:
    shape = [200, 501]
    rate = limit / (1 << 32)
    deviation = math.sqrt(rate * (1 - rate) / math.prod(shape))
    found = drawn(shape, limit=limit).double()
    assert abs(found.mean() - rate) <= 5 * deviation
    along = [found.mean(dim) - rate for dim in (0, 1)]
    assert all(
        part.abs().max() <= 6 * math.sqrt(rate * (1 - rate) / size)
        for part, size in zip(along, shape, strict=True)
    )


def test_neighbours_are_independent() -> None:
    found = drawn([256, 256]).double() - 0.5
    for shift in ((0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)):
        correlation = 4 * (found * found.roll(shift, (0, 1))).mean()
        assert abs(correlation) <= 5 / 256
