"""Rules of products of matrices, convolutions, pooling and attention."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.kernels.legality.call import (
    Call,
    Made,
    Makes,
    Operand,
    Table,
    activation,
    flag,
    holds,
    like,
    need,
    of_rank,
    one_float,
    ranged,
    shaped,
)

_COUNTED = 2**63


def _gemm(call: Call) -> Makes:
    dtype, a, (rows, columns) = one_float(call), call["a"], of_rank(call, "b", 2)
    turned_a, turned_b = flag(call, "transpose_a", "transpose_b")
    activation(call)
    holds(call, "alpha", "f64" if dtype == "f64" else "f32")
    if turned_a or len(a.shape) < 2:
        of_rank(call, "a", 2)
    leading, k = (a.shape[1:], a.shape[0]) if turned_a else (a.shape[:-1], a.shape[-1])
    inner, n = (columns, rows) if turned_b else (rows, columns)
    need(k == inner, f"a is {a} and b is {call['b']}", "as many columns of a as rows of b")
    shaped(call, "bias", (n,))
    shaped(call, "residual", (*leading, n))
    return [[Made((*leading, n), dtype)]]


def _bmm(call: Call) -> Makes:
    dtype, a, b = one_float(call), of_rank(call, "a", 3), of_rank(call, "b", 3)
    need(
        (a[0], a[2]) == b[:2],
        f"a is {call['a']} and b is {call['b']}",
        "as many matrices, and as many columns of a's as rows of b's",
    )
    return [[Made((*a[:2], b[2]), dtype)]]


# --- convolutions and pooling ----------------------------------------------------------------


def _pairs(call: Call, **lowest: int) -> list[tuple[int, int]]:
    """Attributes of two numbers each, from ``lowest`` up."""
    found = []
    for name, low in lowest.items():
        value: Sequence[int] = call.attrs[name]
        fits = len(value) == 2 and min(value) >= low
        need(fits, f"{name}={list(value)}", f"two numbers from {low} up")
        found.append((value[0], value[1]))
    return found


def _windows(
    call: Call,
    x: Operand,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[int, int]:
    """How many places a window has, down and across; there is one at least."""
    counts = [
        (size + 2 * pad - length) // step + 1
        for size, length, step, pad in zip(x.shape[2:], kernel, stride, padding, strict=True)
    ]
    need(
        min(counts) > 0,
        f"windows of {list(kernel)} on x {x} with a padding of {list(padding)}",
        "windows no larger than what they move on",
    )
    return counts[0], counts[1]


def _conv(call: Call) -> Makes:
    dtype, x, w = one_float(call), call["x"], call["w"]
    batch, channels, *_ = of_rank(call, "x", 4)
    made, each, *kernel = of_rank(call, "w", 4)
    stride, padding, dilation = _pairs(call, stride=1, padding=0, dilation=1)
    groups = ranged(call, "groups", 1, _COUNTED)
    activation(call)
    need(
        channels == each * groups and made % groups == 0 and min(kernel) > 0,
        f"w is {w} and x is {x}, in {groups} groups",
        "w [out, channels of x / groups, height, width], out a multiple of groups",
    )
    spread = [by * (size - 1) + 1 for by, size in zip(dilation, kernel, strict=True)]
    shape = (batch, made, *_windows(call, x, spread, stride, padding))
    shaped(call, "bias", (made,))
    shaped(call, "residual", shape)
    return [[Made(shape, dtype)]]


def _pool(call: Call) -> Makes:
    dtype, x = one_float(call), call["x"]
    batch, channels, *_ = of_rank(call, "x", 4)
    kernel, stride, padding = _pairs(call, kernel=1, stride=1, padding=0)
    flag(call, "mean", "count_padding")
    within = all(2 * pad <= size for pad, size in zip(padding, kernel, strict=True))
    need(within, f"padding={list(padding)}", f"half the kernel {list(kernel)} at most")
    return [[Made((batch, channels, *_windows(call, x, kernel, stride, padding)), dtype)]]


# --- attention -------------------------------------------------------------------------------


def _attended(call: Call) -> tuple[Operand, Operand]:
    """Queries and keys, when all of an attention's operands fit them."""
    one_float(call, "q", "k", "v", "mask")
    b, h, length, depth = of_rank(call, "q", 4)
    q, k, mask = call["q"], call["k"], call.get("mask")
    fits = len(k.shape) == 4 and k.shape == (b, h, k.shape[2], depth)
    need(fits, f"q is {q} and k is {k}", "as many batches, heads and numbers a head")
    shaped(call, "v", k.shape)
    (causal,) = flag(call, "causal")
    if mask is not None:
        scores = (b, h, length, k.shape[2])
        ends = scores[len(scores) - len(mask.shape) :]
        wide = len(mask.shape) <= 4 and all(
            size in (1, full) for size, full in zip(mask.shape, ends, strict=True)
        )
        need(
            wide and not causal, f"mask is {mask}", f"what broadcasts to {list(scores)}, no causal"
        )
    return q, k


def _sums(q: Operand) -> list[Made]:
    """The logarithms of sums of exps, in f64 for f64, else in f32, as torch's kernels have them."""
    return [Made(q.shape[:3], "f64" if q.dtype == "f64" else "f32")]


def _attention(call: Call) -> Makes:
    q, _ = _attended(call)
    return [[like(q)], _sums(q)]


def _attention_backward(call: Call) -> Makes:
    q, k = _attended(call)
    lse, sums = call["lse"], _sums(q)
    one_float(call, "q", "dy", "y")
    shaped(call, "dy", q.shape)
    shaped(call, "y", q.shape)
    need(lse[:2] in sums, f"lse is {lse}", " or ".join(map(str, sums)))
    return [[like(q)], [like(k)], [like(k)]]


TABLE: Table = {
    "gemm": _gemm,
    "bmm": _bmm,
    "conv": _conv,
    "pool": _pool,
    "attention": _attention,
    "attention_bwd": _attention_backward,
}
