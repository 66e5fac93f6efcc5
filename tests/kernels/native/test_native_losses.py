"""Native cross entropy and mean squared error, and their gradients, against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}
NONE, MEAN, SUM = 0, 1, 2
IGNORE = -100


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    finite = expected.isfinite()
    torch.testing.assert_close(found[~finite], expected[~finite], equal_nan=True)
    if finite.any():
        atol = TOLERANCE[expected.dtype] * max(1.0, expected[finite].abs().max().item())
        torch.testing.assert_close(found[finite], expected[finite], rtol=0, atol=atol)


@settings(deadline=None)
@given(
    rows=st.integers(1, 9),
    classes=st.one_of(st.integers(1, 5), st.integers(14, 100)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    index=st.sampled_from([torch.int64, torch.int32]),
    weighted=st.booleans(),
    reduction=st.sampled_from([NONE, MEAN, SUM]),
    ignored=st.sampled_from(["none", "some", "all"]),
    bad=st.sampled_from([None, float("nan"), float("inf"), -float("inf")]),
    gap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_cross_entropy_and_its_gradient(
    rows: int,
    classes: int,
    dtype: torch.dtype,
    index: torch.dtype,
    weighted: bool,
    reduction: int,
    ignored: str,
    bad: float | None,
    gap: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, classes + 3 * gap, dtype=dtype)[:, :classes] * 3
    if bad is not None:
        x[0, -1] = bad
    target = torch.randint(0, classes, (rows,))
    ignore = IGNORE if seed % 2 else 0
    if ignored != "none":
        target[:: 1 if ignored == "all" else 2] = ignore
    weight = torch.rand(classes, dtype=dtype) if weighted else None

    lp = torch.log_softmax(x, 1)
    loss, total = torch.ops.aten.nll_loss_forward.default(lp, target, weight, reduction, ignore)
    made = [torch.empty_like(loss), torch.empty_like(total), torch.empty(x.shape, dtype=dtype)]
    attrs = {"reduction": reduction, "ignore": ignore}
    native_call("cross_entropy", attrs, [x, target.to(index), weight], made)
    for found, expected in zip(made, (loss, total, lp), strict=True):
        close(found, expected)

    there = x.clone()  # the log-probabilities may lie in x
    native_call("cross_entropy", attrs, [there, target.to(index), weight], [*made[:2], there])
    torch.testing.assert_close(there, made[2], rtol=0, atol=0, equal_nan=True)

    dloss = torch.randn_like(loss)
    inner = torch.ops.aten.nll_loss_backward.default(
        dloss, lp, target, weight, reduction, ignore, total
    )
    expected = torch.ops.aten._log_softmax_backward_data.default(inner, lp, 1, dtype)
    # torch adds an ignored row's terms too, and finds NaN where one is infinite.
    expected[target == ignore] = 0
    inputs = [dloss, made[2], target.to(index), total, weight]
    dx = torch.empty(x.shape, dtype=dtype)
    native_call("cross_entropy_bwd", attrs, inputs, [dx])
    close(dx, expected)
    native_call("cross_entropy_bwd", attrs, inputs, [made[2]])
    torch.testing.assert_close(made[2], dx, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_is_autograds(reduction: str) -> None:
    x = torch.randn(40, 30, dtype=torch.float64, requires_grad=True)
    target, weight = torch.randint(0, 30, (40,)), torch.rand(30, dtype=torch.float64)
    target[3] = IGNORE
    expected = torch.nn.functional.cross_entropy(x, target, weight, reduction=reduction)
    (3 * expected).backward()
    attrs = {"reduction": {"mean": MEAN, "sum": SUM}[reduction], "ignore": IGNORE}
    loss, total, log_probs = torch.zeros_like(expected), torch.zeros_like(expected), x.detach() * 0
    native_call("cross_entropy", attrs, [x.detach(), target, weight], [loss, total, log_probs])
    close(loss, expected.detach())
    dx = torch.empty_like(log_probs)
    dloss = torch.tensor(3.0, dtype=torch.float64)
    native_call("cross_entropy_bwd", attrs, [dloss, log_probs, target, total, weight], [dx])
    assert x.grad is not None
    close(dx, x.grad)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wrong", [-1, 1000, -101])
def test_a_class_that_does_not_exist_is_an_error(wrong: int, threads: int) -> None:
    x, target = torch.randn(300, 1000), torch.randint(0, 1000, (300,))
    target[299] = wrong
    one, attrs = torch.ones(()), {"reduction": MEAN, "ignore": IGNORE}
    message = f"row 299 has the class {wrong}; there are 1000 classes"
    outputs = [torch.empty(()), torch.empty(()), torch.empty_like(x)]
    with pytest.raises(ExecError, match=message):
        native_call("cross_entropy", attrs, [x, target, None], outputs, threads=threads)
    inputs = [one, x, target, one, None]
    with pytest.raises(ExecError, match=message):
        native_call("cross_entropy_bwd", attrs, inputs, [torch.empty_like(x)], threads=threads)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_are_deterministic(threads: int) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(500, 300), torch.randint(0, 300, (500,))
    a, b = torch.randn(200_000), torch.randn(200_000)
    found = []
    for count in (1, threads, threads):
        outputs = [torch.empty(()), torch.empty(()), torch.empty_like(x)]
        native_call("cross_entropy", {}, [x, target, None], outputs, threads=count)
        square = torch.empty(())
        native_call("mse", {}, [a, b], [square], threads=count)
        found.append([*outputs, square])
    for alone, first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        close(first, alone)


@settings(deadline=None)
@given(
    shape=st.lists(st.one_of(st.integers(1, 4), st.integers(14, 40)), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    reduction=st.sampled_from([NONE, MEAN, SUM]),
    turned=st.booleans(),
    bad=st.sampled_from([None, float("nan"), float("inf")]),
)
def test_mse_and_its_gradient(
    shape: list[int], dtype: torch.dtype, reduction: int, turned: bool, bad: float | None
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    if turned:
        a, b = (t.permute(list(reversed(range(t.dim())))) for t in (a, b))
    if bad is not None:
        a[(0,) * a.dim()] = bad
    expected = torch.ops.aten.mse_loss.default(a, b, reduction)
    loss = torch.empty_like(expected)
    native_call("mse", {"reduction": reduction}, [a, b], [loss])
    close(loss, expected)
    dloss = torch.randn_like(expected)
    da = torch.empty_like(a)
    native_call("mse_bwd", {"reduction": reduction}, [dloss, a, b], [da])
    close(da, torch.ops.aten.mse_loss_backward.default(dloss, a, b, reduction))
    for place in (1, 2):
        given = [dloss, a.clone(), b.clone()]
        native_call("mse_bwd", {"reduction": reduction}, given, [given[place]])
        torch.testing.assert_close(given[place], da, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "why"),
    [
        ("mse", [torch.zeros(3, 4), torch.zeros(4, 3).t()], [torch.zeros(())], "strides"),
        ("mse", [torch.zeros(3, 4), torch.zeros(4)], [torch.zeros(())], "strides"),
        ("mse", [torch.zeros(3), torch.zeros(3).double()], [torch.zeros(())], "dtypes"),
        ("mse", [torch.zeros(3), torch.zeros(3)], [torch.zeros(3)], "the loss"),
        (
            "cross_entropy",
            [torch.zeros(4, 3).t(), torch.zeros(3, dtype=torch.int64), None],
            [torch.zeros(()), torch.zeros(()), torch.zeros(3, 4)],
            "apart",
        ),
        (
            "cross_entropy",
            [torch.zeros(3, 4), torch.zeros(3), None],
            [torch.zeros(()), torch.zeros(()), torch.zeros(3, 4)],
            "i64 or i32",
        ),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(
    kind: str, inputs: list[torch.Tensor | None], outputs: list[torch.Tensor], why: str
) -> None:
    with pytest.raises(ExecError, match=why):
        native_call(kind, {}, inputs, outputs)
