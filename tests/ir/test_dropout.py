import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.ir import DROPOUT, Builder, compile_graph, resolve
from shardwright.ir.dropout import dropout, philox, words_below
from shardwright.ir.operators import is_built_in

STEP = torch.tensor([3])


def dropped(x, p=0.4, *, seed=7, step=3, site=2, offsets=None, whole=None):
    offsets = [0] * x.dim() if offsets is None else offsets
    whole = list(x.shape) if whole is None else whole
    return dropout(x, p, seed, torch.tensor([step]), site, offsets, whole)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 9), st.integers(1, 11))
def test_a_slice_of_the_whole_is_the_slice(row: int, rows: int, column: int, columns: int) -> None:
    x = torch.randn(10, 20)
    part = (slice(row, row + rows), slice(column, column + columns))
    made = dropped(x[part], offsets=[row, column], whole=[10, 20])
    assert torch.equal(made, dropped(x)[part])


def test_kept_elements_are_scaled_and_the_mean_stays() -> None:
    x = torch.ones(500, 400, dtype=torch.float64)
    y = dropped(x, 0.3)
    assert set(y.unique().tolist()) == {0.0, 1 / 0.7}
    assert y.mean() == pytest.approx(1, abs=5 * (0.3 / 0.7 / x.numel()) ** 0.5)


def test_the_same_call_drops_the_same() -> None:
    x = torch.randn(30, 30)
    assert torch.equal(dropped(x), dropped(x))


@pytest.mark.parametrize("change", [{"seed": 8}, {"step": 4}, {"site": 3}])
def test_another_seed_step_or_site_drops_others(change: dict[str, int]) -> None:
    x = torch.ones(30, 30)
    assert not torch.equal(dropped(x), dropped(x, **change))


def test_nothing_and_everything() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    assert torch.equal(dropped(x, 0.0), x)
    gone = dropped(x, 1.0)
    assert torch.equal(gone, torch.zeros(4, 5))
    gone.sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 5))


def test_the_gradient_is_dropped_as_the_value() -> None:
    x = torch.ones(20, 20, requires_grad=True)
    y = dropped(x)
    gradient = torch.randn(20, 20)
    y.backward(gradient)
    assert torch.equal(x.grad, dropped(gradient))
    assert torch.equal(x.grad != 0, y != 0)


def test_a_gradient_of_the_gradient() -> None:
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(dropped, x)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3, 4, 5)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    assert dropped(torch.ones(shape)).shape == shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_dropped_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    y = dropped(torch.ones(20, 20, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y != 0, dropped(torch.ones(20, 20)) != 0)


def test_infinities_are_dropped_too() -> None:
    assert set(dropped(torch.full((20, 20), torch.inf)).unique().tolist()) == {0.0, torch.inf}


def test_torch_checks_the_operator() -> None:
    arguments = (torch.randn(4, 6).t(), 0.5, 1, STEP, 0, [0, 0], [6, 4])
    torch.library.opcheck(dropout, arguments)
    x = torch.randn(4, 6, requires_grad=True)
    torch.library.opcheck(dropout, (x, 0.5, 1, STEP, 0, [2, 0], [6, 6]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), 0.5, 1, STEP, 0, [0], [2, 3]), "the slice is not inside"),
        ((torch.ones(2, 3), 0.5, 1, STEP, 0, [0, 1], [2, 3]), r"\[2, 3\] at \[0, 1\] of a tensor"),
        ((torch.ones(2), 1.5, 1, STEP, 0, [0], [2]), "p=1.5 of torch.float32; p is from 0 to 1"),
        ((torch.ones(2).long(), 0.5, 1, STEP, 0, [0], [2]), "x is of floats"),
        ((torch.ones(2), 0.5, 1, STEP.float(), 0, [0], [2]), r"a step of torch.float32\[1\]"),
    ],
)
def test_a_wrong_call_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dropout(*arguments)


def test_a_graph_has_it_as_an_operator_of_every_process() -> None:
    builder = Builder("g")
    x, step = builder.input("x", (4, 6)), builder.input("step", (1,), "i64")
    y = builder.call(DROPOUT, x, 0.5, 7, step, 0, [0, 0], [4, 6])
    assert (y.shape, y.dtype) == ((4, 6), "f32")
    x = torch.randn(4, 6)
    (made,) = compile_graph(builder.finish([y]))([x, STEP])
    assert torch.equal(made, dropped(x, 0.5, site=0))
    assert is_built_in(DROPOUT)
    assert not is_built_in("shardwright.matmul_custom.default")
    assert resolve(DROPOUT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_drops_the_same() -> None:
    x = torch.randn(300, 1000)
    made = dropout(x.cuda(), 0.4, 7, STEP.cuda(), 2, [0, 0], [300, 1000])
    assert torch.equal(made.cpu(), dropped(x))


# --- random bits ----------------------------------------------------------------------------------


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
