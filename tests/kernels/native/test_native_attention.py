"""Kinds attention and attention_bwd against torch's own kernels and against plain formulas."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.native.calls import native_bind, native_call

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13}
lengths = st.sampled_from([1, 2, 5, 16, 31, 32, 33, 64, 70, 130, 300])
masks = st.sampled_from(["none", "full", "keys", "rows", "bool"])


def close(found: torch.Tensor, expected: torch.Tensor, slack: float = 1.0) -> bool:
    bound = TOLERANCE[found.dtype] * slack * max(1.0, float(expected.abs().max()))
    return bool(((found - expected).abs() <= bound).all())


def heads(batch: int, count: int, length: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """[batch, heads, length, depth], as a view of a projection lies."""
    return torch.randn(batch, length, count, depth, dtype=dtype).transpose(1, 2)


def mask_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    b, _, rows, columns = shape
    if kind == "none":
        return None
    if kind == "bool":
        keep = torch.rand(b, 1, rows, columns) > 0.3
        keep[..., 0] = True
        return keep
    sizes = {"full": shape, "keys": (b, 1, 1, columns), "rows": (rows, columns)}[kind]
    return torch.randn(sizes, dtype=dtype)


def as_added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask as torch's kernel takes it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


def run_forward(
    inputs: list[torch.Tensor | None], attrs: dict[str, Any], threads: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = inputs[0], inputs[2]
    assert q is not None
    assert v is not None
    y = torch.full_like(q[..., :1].expand(*q.shape[:-1], v.shape[-1]).contiguous(), torch.nan)
    lse = torch.full(q.shape[:-1], torch.nan, dtype=q.dtype)
    native_call("attention", attrs, inputs, [y, lse], threads=threads)
    return y, lse


@settings(max_examples=120, deadline=None)
@given(
    batch=st.integers(1, 3),
    count=st.integers(1, 3),
    queries=lengths,
    keys=lengths,
    depth=st.sampled_from([1, 8, 24, 32, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    causal=st.booleans(),
    mask_kind=masks,
    threads=st.sampled_from([1, 2]),
)
def test_both_ways_as_torch(
    batch: int,
    count: int,
    queries: int,
    keys: int,
    depth: int,
    dtype: torch.dtype,
    causal: bool,
    mask_kind: str,
    threads: int,
) -> None:
    torch.manual_seed(queries * keys + depth)
    if causal:
        mask_kind = "none"
    q = heads(batch, count, queries, depth, dtype)
    k, v = (heads(batch, count, keys, depth, dtype) for _ in range(2))
    mask = mask_of(mask_kind, (batch, count, queries, keys), dtype)
    added = as_added(mask, dtype)
    attrs = {"causal": int(causal), "scale": 0.3}
    y, lse = run_forward([q, k, v, mask], attrs, threads)
    expected = FORWARD(q, k, v, 0.0, causal, attn_mask=added, scale=0.3)
    assert close(y, expected[0])
    assert close(lse, expected[1])

    dy = torch.randn_like(y)
    wanted = BACKWARD(dy, q, k, v, *expected, 0.0, causal, attn_mask=added, scale=0.3)
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    inputs = [dy, q, k, v, expected[0], expected[1], mask]
    native_call("attention_bwd", attrs, inputs, grads, threads=threads)
    # With one key the gradients are what is left of sums that cancel out: rounding alone.
    assert all(close(found, want, slack=20) for found, want in zip(grads, wanted, strict=True))


def test_long_sequences_go_block_by_block() -> None:
    q, k, v = (heads(1, 2, 1100, 32, torch.float32) for _ in range(3))
    for causal in (0, 1):
        y, lse = run_forward([q, k, v, None], {"causal": causal, "scale": 0.2}, threads=2)
        expected = FORWARD(q, k, v, 0.0, bool(causal), scale=0.2)
        assert close(y, expected[0])
        assert close(lse, expected[1])


def test_views_of_a_fused_projection_and_outputs_in_their_layout() -> None:
    fused = torch.randn(2, 40, 3, 4, 16)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    y, lse = torch.empty(2, 40, 4, 16).transpose(1, 2), torch.empty(2, 40, 4).transpose(1, 2)
    native_call("attention", {"causal": 1, "scale": 0.25}, [q, k, v, None], [y, lse])
    expected = FORWARD(q, k, v, 0.0, True, scale=0.25)
    assert close(y, expected[0])
    assert close(lse, expected[1])
    into = torch.empty_like(fused)
    grads = [into[:, :, i].transpose(1, 2) for i in range(3)]
    dy = torch.randn(2, 40, 4, 16).transpose(1, 2)
    inputs = [dy, q, k, v, y, lse, None]
    native_call("attention_bwd", {"causal": 1, "scale": 0.25}, inputs, grads)
    wanted = BACKWARD(dy, q, k, v, *expected, 0.0, True, scale=0.25)
    assert all(close(found, want, slack=4) for found, want in zip(grads, wanted, strict=True))


def test_values_may_be_narrower_than_keys_and_lse_absent() -> None:
    q, k = heads(1, 2, 10, 16, torch.float64), heads(1, 2, 12, 16, torch.float64)
    v, y = heads(1, 2, 12, 6, torch.float64), torch.empty(1, 2, 10, 6, dtype=torch.float64)
    native_call("attention", {"causal": 0, "scale": 0.5}, [q, k, v, None], [y, None])
    assert close(y, (0.5 * q @ k.mT).softmax(-1) @ v)


def test_a_row_that_sees_no_key_is_zero() -> None:
    q, k, v = (heads(1, 1, 5, 8, torch.float32) for _ in range(3))
    mask = torch.zeros(5, 5)
    mask[2] = -torch.inf
    y, lse = run_forward([q, k, v, mask], {"causal": 0, "scale": 1.0})
    expected = FORWARD(q, k, v, 0.0, False, attn_mask=mask, scale=1.0)
    assert close(y, expected[0])
    assert close(lse, expected[1])
    assert not y[0, 0, 2].any()
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    native_call(
        "attention_bwd",
        {"causal": 0, "scale": 1.0},
        [torch.ones_like(y), q, k, v, y, lse, mask],
        grads,
    )
    assert not grads[0][0, 0, 2].any()
    assert all(grad.isfinite().all() for grad in grads)


def test_nan_stays_in_the_rows_that_see_it() -> None:
    q, k, v = (heads(1, 1, 40, 8, torch.float32) for _ in range(3))
    k[0, 0, 20, 3] = torch.nan
    y, lse = run_forward([q, k, v, None], {"causal": 1, "scale": 1.0})
    assert torch.equal(y[0, 0].isnan().any(-1), torch.arange(40) >= 20)
    assert torch.equal(lse[0, 0].isnan(), torch.arange(40) >= 20)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (heads(1, 1, 300, 8, torch.float32) for _ in range(3))
    y, lse = run_forward([q * 100, k * 100, v, None], {"causal": 0, "scale": 1.0})
    expected = (1e4 * q.double() @ k.double().mT).softmax(-1) @ v.double()
    assert y.isfinite().all()
    assert lse.isfinite().all()
    assert ((y - expected).abs() <= 2e-2).all()


@pytest.mark.parametrize("causal", [0, 1])
def test_one_and_two_threads_give_the_same_bits(causal: int) -> None:
    q, k, v = (heads(2, 3, 70, 32, torch.float32) for _ in range(3))
    attrs = {"causal": causal, "scale": 0.2}
    one, two = (run_forward([q, k, v, None], attrs, threads) for threads in (1, 2))
    assert all(map(torch.equal, one, two))
    dy = torch.randn_like(one[0])
    grads = [[torch.empty_like(t) for t in (q, k, v)] for _ in range(2)]
    for threads in (1, 2):
        inputs = [dy, q, k, v, *one, None]
        native_call("attention_bwd", attrs, inputs, grads[threads - 1], threads=threads)
    assert all(map(torch.equal, *grads))


def refusal(inputs: list[torch.Tensor | None], outputs: list[torch.Tensor | None]) -> str:
    kind = "attention" if len(outputs) == 2 else "attention_bwd"
    found = native_bind(kind, {"causal": 0, "scale": 1.0}, inputs, outputs)
    assert isinstance(found, str)
    return found


def test_what_is_refused() -> None:
    x, lse = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4)
    assert "f32" in refusal([x.half()] * 3 + [None], [x.half(), lse])
    assert "depth" in refusal([x, x[..., :4], x, None], [x, lse])
    assert "gaps" in refusal([x, torch.ones(1, 2, 4, 16)[..., ::2], x, None], [x, lse])
    assert "heads" in refusal([x, x[:, :1], x[:, :1], None], [x, lse])
    assert "mask" in refusal([x, x, x, torch.ones(4, 3)], [x, lse])
    assert "mask" in refusal([x, x, x, torch.ones(4, 4).double()], [x, lse])
    assert "outputs" in refusal([x, x, x, None], [x[..., :4], lse])
    assert "lse" in refusal([x, x, x, x, x, lse[..., :2], None], [x, x, x])
    assert "gradients" in refusal([x, x, x, x, x, lse, None], [x, x, x[:, :, :2]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_sees_no_key_is_zero_whatever_the_values_are(bad: float) -> None:
    q, k, v = (heads(1, 1, 5, 8, torch.float32) for _ in range(3))
    v[0, 0, 3] = bad
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    y, lse = run_forward([q, k, v, mask], {"causal": 0, "scale": 1.0})
    assert torch.equal(y[0, 0, 2], torch.zeros(8))
    assert lse[0, 0, 2] == 0
    assert not y[0, 0, 1].isfinite().any()
