"""Native batch norm and its gradients against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}
EPS, MOMENTUM = 1e-5, 0.1
aten: Any = torch.ops.aten


def close(found: torch.Tensor | None, expected: torch.Tensor, least: float = 1.0) -> None:
    if found is None:
        return
    finite = expected.isfinite()
    torch.testing.assert_close(found[~finite], expected[~finite], equal_nan=True)
    if finite.any():
        atol = TOLERANCE[expected.dtype] * max(least, expected[finite].abs().max().item())
        torch.testing.assert_close(found[finite], expected[finite], rtol=0, atol=atol)


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(x)  # keeps the strides


@st.composite
def drawn(draw: st.DrawFn) -> torch.Tensor:
    """[n, c], [n, c, l], [n, c, h, w], contiguous or with channels last, sometimes with gaps."""
    torch.manual_seed(draw(st.integers(0, 99)))
    channels = draw(st.one_of(st.integers(1, 5), st.integers(14, 150)))
    samples = draw(st.integers(2, 70 if channels < 6 else 9))
    space = draw(st.lists(st.integers(1, 7), max_size=2))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    gap = draw(st.sampled_from([0, 0, 2]))
    if draw(st.booleans()):
        x = torch.randn(samples, *space, channels + gap, dtype=dtype)[..., :channels]
        return x.movedim(-1, 1)
    return torch.randn(samples, channels + gap, *space, dtype=dtype)[:, :channels]


Figures = list[torch.Tensor | None]


def figures(x: torch.Tensor, present: list[bool]) -> Figures:
    """Weight and bias."""
    made = [torch.randn(x.shape[1], dtype=x.dtype) for _ in present]
    return [t if there else None for t, there in zip(made, present, strict=True)]


presence = st.lists(st.booleans(), min_size=2, max_size=2)


@settings(deadline=None)
@given(drawn(), presence, st.booleans(), st.sampled_from([None, float("nan"), float("inf")]))
def test_training_forward(
    x: torch.Tensor, present: list[bool], tracked: bool, bad: float | None
) -> None:
    if bad is not None:
        x[(0,) * x.dim()] = bad
    weight, bias = figures(x, present)
    channels = x.shape[1]
    old: Figures = [None, None]
    if tracked:
        old = [torch.randn(channels, dtype=x.dtype), torch.rand(channels, dtype=x.dtype)]
    new = [None if t is None else t.clone() for t in old]
    expected = aten.native_batch_norm.default(x, weight, bias, *new, True, MOMENTUM, EPS)
    made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype), like(expected[1])]
    made += [like(expected[2])]
    renewed = [None if t is None else torch.empty_like(t) for t in old]
    attrs = {"training": 1, "momentum": MOMENTUM, "eps": EPS}
    native_call("batch_norm", attrs, [x, weight, bias, *old], [*made, *renewed])
    well = expected[1].isfinite()  # of a channel with an inf torch has other ideas
    steep = max(1.0, expected[2][well].max().item() if well.any() else 1.0)
    close(made[0][:, well], expected[0][:, well], steep)
    close(made[1][well], expected[1][well])
    close(made[2][well], expected[2][well], steep**2)
    assert not made[0][:, ~well].isfinite().any()
    for found, wanted in zip(renewed, new, strict=True):
        if found is not None and wanted is not None:
            close(found[well], wanted[well])
    # In the old ones' memory, and with nothing but y.
    native_call("batch_norm", attrs, [x, weight, bias, *old], [*made, *old])
    for found, wanted in zip(old, renewed, strict=True):
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    native_call("batch_norm", attrs, [x, weight, bias, *old], [made[0], None, None, None, None])


@settings(deadline=None)
@given(drawn(), presence)
def test_evaluation_forward(x: torch.Tensor, present: list[bool]) -> None:
    weight, bias = figures(x, present)
    mean, variance = torch.randn(x.shape[1], dtype=x.dtype), torch.rand(x.shape[1], dtype=x.dtype)
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    attrs = {"training": 0, "momentum": MOMENTUM, "eps": EPS}
    native_call("batch_norm", attrs, [x, weight, bias, mean, variance], [y, *[None] * 4])
    expected = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.1, EPS)
    close(y, expected, 300)


@settings(deadline=None)
@given(drawn(), st.booleans(), st.booleans(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_backward(x: torch.Tensor, weighted: bool, training: bool, wanted: list[bool]) -> None:
    dy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(torch.randn(x.shape))
    channels = x.shape[1]
    weight = torch.randn(channels, dtype=x.dtype) if weighted else None
    running = [torch.randn(channels, dtype=x.dtype), torch.rand(channels, dtype=x.dtype) + 0.1]
    _, mean, invstd = aten.native_batch_norm.default(
        x, weight, None, None, None, True, MOMENTUM, EPS
    )
    expected = aten.native_batch_norm_backward.default(
        dy, x, weight, *running, mean, invstd, training, EPS, [True, True, True]
    )
    made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype), like(mean), like(mean)]
    outputs = [t if there else None for t, there in zip(made, wanted, strict=True)]
    saved = [None, None, mean, invstd] if training else [*running, None, None]
    native_call(
        "batch_norm_bwd", {"training": training, "eps": EPS}, [dy, x, weight, *saved], outputs
    )
    # The sums cancel: they are small against their terms.
    steep = invstd.max().item() if training else 4
    terms = x.numel() / channels * steep
    for found, wants, least in zip(outputs, expected, (10 * steep, terms, terms), strict=True):
        close(found, wants, least)


@pytest.mark.parametrize("shape", [(64, 40, 20, 20), (500, 200), (40, 24, 100)])
@pytest.mark.parametrize("last", [False, True])
def test_threads_change_no_bit(shape: tuple[int, ...], last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    dy, weight = like(x), torch.randn(shape[1])
    found = []
    for threads in (1, 2, 3):
        made = [torch.empty_like(x), torch.empty(shape[1]), torch.empty(shape[1])]
        grads = [torch.empty_like(x), torch.empty(shape[1]), torch.empty(shape[1])]
        attrs = {"training": 1, "momentum": MOMENTUM, "eps": EPS}
        inputs = [x, weight, None, None, None]
        native_call("batch_norm", attrs, inputs, [*made, None, None], threads=threads)
        inputs = [dy, x, weight, None, None, *made[1:]]
        attrs = {"training": 1, "eps": EPS}
        native_call("batch_norm_bwd", attrs, inputs, grads, threads=threads)
        found.append([*made, *grads])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("last", [False, True])
def test_results_may_lie_in_memory_of_inputs(last: bool) -> None:
    x, mean, invstd = torch.randn(6, 20, 7, 7), torch.empty(20), torch.empty(20)
    if last:
        x = x.to(memory_format=torch.channels_last)
    y, dy, dx = torch.empty_like(x), like(x), torch.empty_like(x)
    attrs = {"training": 1, "momentum": MOMENTUM, "eps": EPS}
    rest = [None, None, None, None]
    native_call("batch_norm", attrs, [x, *rest], [y, mean, invstd, None, None])
    inputs = [dy, x, None, None, None, mean, invstd]
    attrs_bwd = {"training": 1, "eps": EPS}
    native_call("batch_norm_bwd", attrs_bwd, inputs, [dx, None, None])
    for place in (0, 1):
        given = [t if t is None else t.clone() for t in inputs]
        native_call("batch_norm_bwd", attrs_bwd, given, [given[place], None, None])
        found = given[place]
        assert found is not None
        assert torch.equal(found, dx)
    native_call("batch_norm", attrs, [x, *rest], [x, None, None, None, None])
    assert torch.equal(x, y)


@pytest.mark.parametrize("last", [False, True])
def test_a_channel_far_from_zero_keeps_its_deviation(last: bool) -> None:
    x = torch.randn(64, 3, 40, 40) * 1e-2 + 100
    if last:
        x = x.to(memory_format=torch.channels_last)
    y, mean, invstd = torch.empty_like(x), torch.empty(3), torch.empty(3)
    attrs = {"training": 1, "momentum": MOMENTUM, "eps": 0.0}
    native_call("batch_norm", attrs, [x, None, None, None, None], [y, mean, invstd, None, None])
    exact = 1 / x.double().transpose(0, 1).flatten(1).std(1, correction=0)
    torch.testing.assert_close(invstd.double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("x", "training", "why"),
    [
        (torch.zeros(4, 3, 5, 6).transpose(2, 3), 1, "one piece"),
        (torch.zeros(4), 1, "n, c"),
        (torch.zeros(4, 3), 0, "absent"),
        (torch.zeros(4, 3).half(), 1, "dtypes"),
    ],
)
def test_what_the_kernel_does_not_do_is_refused(x: torch.Tensor, training: int, why: str) -> None:
    attrs = {"training": training, "momentum": MOMENTUM, "eps": EPS}
    with pytest.raises(ExecError, match=why):
        native_call("batch_norm", attrs, [x, None, None, None, None], [x, None, None, None, None])
