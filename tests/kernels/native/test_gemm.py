"""Kinds gemm and bmm against torch, in f64 where f32 is what is tested."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from shardwright.kernels.row import ACTIVATIONS
from tests.kernels.native.calls import native_bind, native_call

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
sizes = st.sampled_from([1, 2, 7, 8, 9, 16, 31, 48, 49, 64, 97])
depths = st.sampled_from([1, 5, 16, 33, 383, 384, 385, 800])
dtypes = st.sampled_from([torch.float32, torch.float64])


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    size = expected.abs().max()
    return bool(((found - expected).abs() <= TOLERANCE[dtype] * (1 + size)).all())


def scaled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, in f64 exactly what they are in ``dtype``."""
    return torch.randn(shape, dtype=dtype) / 4


@settings(max_examples=150, deadline=None)
@given(
    m=sizes,
    n=sizes,
    k=depths,
    dtype=dtypes,
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    residual=st.sampled_from(["none", "apart", "in place"]),
    alpha=st.sampled_from([1.0, 0.5]),
    static=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_gemm(m: int, n: int, k: int, dtype: torch.dtype, **drawn: object) -> None:
    torch.manual_seed(m * n + k)
    a = scaled(*((k, m) if drawn["transpose_a"] else (m, k)), dtype=dtype)
    b = scaled(*((n, k) if drawn["transpose_b"] else (k, n)), dtype=dtype)
    bias = scaled(n, dtype=dtype) if drawn["bias"] else None
    residual = None if drawn["residual"] == "none" else scaled(m, n, dtype=dtype)
    left = (a.T if drawn["transpose_a"] else a).double()
    expected = (left @ (b.T if drawn["transpose_b"] else b).double()) * drawn["alpha"]
    for more in (bias, residual):
        expected = expected if more is None else expected + more
    name = str(drawn["activation"])
    attrs = {key: drawn[key] for key in ("transpose_a", "transpose_b", "alpha")}
    y = residual if drawn["residual"] == "in place" else torch.full((m, n), torch.nan, dtype=dtype)
    assert y is not None
    native_call(
        "gemm",
        {**attrs, "activation": ACTIVATIONS.index(name)},
        [a, b, bias, residual],
        [y],
        static=(1,) if drawn["static"] else (),
        threads=int(str(drawn["threads"])),
    )
    assert close(y, FUNCTIONS[name](expected), dtype)


@pytest.mark.parametrize("static", [(), (1,)])
@pytest.mark.parametrize("threads", [1, 2])
def test_large_ones_take_the_epilogue_too(static: tuple[int, ...], threads: int) -> None:
    a, b = torch.randn(300, 200) / 8, torch.randn(150, 200) / 8
    bias, residual = torch.randn(150), torch.randn(300, 150)
    expected = torch.relu(a.double() @ b.double().T + bias + residual)
    inputs = [a, b, bias, residual]
    y = torch.empty(300, 150)
    attrs = {"transpose_b": 1, "activation": 1}
    native_call("gemm", attrs, inputs, [y], static=static, threads=threads)
    assert close(y, expected, torch.float32)
    native_call("gemm", attrs, inputs, [residual], static=static, threads=threads)
    assert torch.equal(residual, y) or close(residual, expected, torch.float32)


def test_views_of_larger_matrices_are_taken_as_they_lie() -> None:
    whole_a, whole_b = torch.randn(70, 90), torch.randn(80, 100)
    out = torch.zeros(70, 64)
    a, b, y = whole_a[3:40, 10:70], whole_b[5:65, 20:50], out[1:38, 9:39]
    native_call("gemm", {}, [a, b, None, None], [y])
    assert close(y, a.double() @ b.double(), torch.float32)
    assert out.count_nonzero() == y.count_nonzero()


def test_strides_that_no_blas_takes() -> None:
    a, b, y = torch.randn(20, 30, 2)[..., 0], torch.randn(40, 60)[::2, ::2].T, torch.empty(20, 20)
    native_call("gemm", {}, [a, b, None, None], [y])
    assert close(y, a.double() @ b.double(), torch.float32)
    row = torch.randn(30).expand(20, 30)
    native_call("gemm", {}, [row, b, None, None], [y])
    assert close(y, row.double() @ b.double(), torch.float32)


def test_several_leading_dimensions_are_rows() -> None:
    a, b, residual = torch.randn(2, 3, 5, 32), torch.randn(32, 40), torch.randn(2, 3, 5, 40)
    y = torch.empty(2, 3, 5, 40)
    native_call("gemm", {}, [a, b, None, residual], [y])
    assert close(y, a.double() @ b.double() + residual, torch.float32)
    one, y = torch.randn(32), torch.empty(40)
    native_call("gemm", {}, [one, b, None, None], [y])
    assert close(y, one.double() @ b.double(), torch.float32)


@pytest.mark.parametrize("rows", [4, 300])
@pytest.mark.parametrize("static", [(), (1,)])
def test_nan_and_inf_reach_what_they_should(rows: int, static: tuple[int, ...]) -> None:
    a, b = torch.ones(rows, 96), torch.ones(96, 100)
    a[1, 3], a[2, 5], b[7, 9] = torch.nan, torch.inf, -torch.inf
    y = torch.empty(rows, 100)
    native_call("gemm", {"transpose_b": 1}, [a, b.T.contiguous(), None, None], [y], static=static)
    assert torch.equal(y.isnan(), (a @ b).isnan())
    assert torch.equal(y.isinf(), (a @ b).isinf())


def test_one_and_two_threads_agree() -> None:
    a, b = torch.randn(60, 384), torch.randn(1536, 384)
    one, two = torch.empty(60, 1536), torch.empty(60, 1536)
    for static in ((), (1,)):
        native_call("gemm", {"transpose_b": 1}, [a, b, None, None], [one], static=static)
        native_call("gemm", {"transpose_b": 1}, [a, b, None, None], [two], static=static, threads=2)
        assert close(one, two, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5),
    m=sizes,
    n=sizes,
    k=st.sampled_from([3, 64]),
    dtype=dtypes,
    transposed=st.tuples(st.booleans(), st.booleans()),
    threads=st.sampled_from([1, 2]),
)
def test_bmm(
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transposed: tuple[bool, bool],
    threads: int,
) -> None:
    torch.manual_seed(m * n + k)
    a = scaled(batch, *((k, m) if transposed[0] else (m, k)), dtype=dtype)
    b = scaled(batch, *((n, k) if transposed[1] else (k, n)), dtype=dtype)
    a, b = (t.mT if swap else t for t, swap in zip((a, b), transposed, strict=True))
    y = torch.full((batch, m, n), torch.nan, dtype=dtype)
    native_call("bmm", {"alpha": 0.5}, [a, b], [y], threads=threads)
    assert close(y, 0.5 * (a.double() @ b.double()), dtype)


@pytest.mark.parametrize("threads", [1, 2])
def test_bmm_of_large_ones_and_of_views(threads: int) -> None:
    a, b = torch.randn(150, 2, 200).transpose(0, 1), torch.randn(200, 180).expand(2, 200, 180)
    y = torch.empty(2, 150, 180)
    native_call("bmm", {}, [a, b], [y], threads=threads)
    assert close(y, a.double() @ b.double(), torch.float32)


def refusal(kind: str, inputs: list[torch.Tensor | None], output: torch.Tensor) -> str:
    found = native_bind(kind, {}, inputs, [output])
    assert isinstance(found, str)
    return found


def test_what_gemm_refuses() -> None:
    a, b, y = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4)
    assert "f32" in refusal("gemm", [a.half(), b.half(), None, None], y.half())
    assert "f32" in refusal("gemm", [a, b.double(), None, None], y)
    assert "output's columns" in refusal("gemm", [a, b, None, None], torch.ones(4, 8)[:, ::2])
    assert "bias" in refusal("gemm", [a, b, torch.ones(1).expand(4), None], y)
    assert "residual" in refusal("gemm", [a, b, None, torch.ones(4, 1).expand(4, 4)], y)
    assert "shapes" in refusal("gemm", [a, torch.ones(5, 4), None, None], y)
    uneven = torch.ones(2, 6, 4)[:, :3]
    assert "one distance" in refusal("gemm", [uneven, b, None, None], torch.ones(2, 3, 4))
    assert "matrix" in refusal("gemm", [a, torch.ones(1, 4, 4), None, None], y)
    assert "f32" in refusal("bmm", [a[None].long(), b[None].long()], y[None].long())
    assert "shapes" in refusal("bmm", [a[None], torch.ones(2, 4, 4)], torch.ones(2, 4, 4))
    with pytest.raises(ExecError, match="gemm: "):
        native_call("gemm", {}, [a.half(), b.half(), None, None], [y.half()])
