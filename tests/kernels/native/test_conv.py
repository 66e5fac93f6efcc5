"""Native convolutions against torch's in double precision."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.errors import ExecError
from shardwright.kernels.row import ACTIVATIONS
from tests.compiler.steps import assert_close
from tests.kernels.native.calls import native_call

F32, F64 = torch.float32, torch.float64
LAST = torch.channels_last
TOLERANCE = {F32: 1e-5, F64: 1e-12}
"""Of the largest element; sums of a few thousand terms."""
FUNCTIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def check(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: bool = False,
    activation: str = "none",
    static: bool = True,
    threads: int = 1,
    in_place: bool = False,
    **attrs,
) -> None:
    """Runs the kernel into memory full of NaN, and compares with torch in f64."""
    wide = [None if t is None else t.double() for t in (x, w, bias)]
    expected = torch.nn.functional.conv2d(*wide, **attrs)
    y = torch.full(expected.shape, math.nan, dtype=x.dtype).to(memory_format=LAST)
    added = None
    if residual or in_place:
        added = torch.randn(expected.shape, dtype=x.dtype).to(memory_format=LAST)
        expected = expected + added.double()
        y = added if in_place else y
    expected = FUNCTIONS[activation](expected)
    pairs = {
        name: (value, value) if isinstance(value, int) and name != "groups" else value
        for name, value in attrs.items()
    }
    native_call(
        "conv",
        {**pairs, "activation": ACTIVATIONS.index(activation)},
        [x, w, bias, added],
        [y],
        static={1} if static else (),
        threads=threads,
    )
    error = (y.double() - expected).abs().max()
    assert error <= TOLERANCE[x.dtype] * expected.abs().max()


def numbers(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    """Normal numbers; those of a weight are scaled so that a sum of products is about 1."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return (made / math.sqrt(math.prod(shape[1:])) if seed else made).to(dtype)


RESNET = [
    # channels in and out, kernel, stride, padding, height and width
    (3, 64, 7, 2, 3, 64),
    (64, 64, 3, 1, 1, 16),
    (64, 128, 3, 2, 1, 16),
    (64, 128, 1, 2, 0, 16),
    (128, 128, 3, 1, 1, 9),
    (256, 256, 3, 1, 1, 7),
    (512, 512, 3, 1, 1, 4),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layer", RESNET, ids=str)
def test_layers_of_a_resnet(layer: tuple[int, ...], batch: int, threads: int) -> None:
    inputs, outputs, kernel, stride, padding, size = layer
    x = numbers(batch, inputs, size, size).to(memory_format=LAST)
    w, bias = numbers(outputs, inputs, kernel, kernel, seed=1), numbers(outputs)
    check(
        x,
        w,
        bias,
        residual=True,
        activation="relu",
        threads=threads,
        stride=stride,
        padding=padding,
    )


@st.composite
def convolutions(draw: st.DrawFn) -> dict:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inside, outside = draw(
        st.tuples(st.sampled_from([1, 3, 16, 17]), st.sampled_from([1, 4, 16, 33]))
    )
    if draw(st.integers(0, 4)) == 0:  # one channel a group
        groups, inside, outside = draw(st.sampled_from([5, 16, 24])), 1, 1
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (3, 3), (7, 7), (2, 3)]))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 1)]))
    size = [draw(st.integers(d * (k - 1) + 1, 15)) for k, d in zip(kernel, dilation, strict=True)]
    dtype = draw(st.sampled_from([F32, F64]))
    x = numbers(draw(st.integers(1, 3)), groups * inside, *size, dtype=dtype)
    return {
        "x": x if draw(st.booleans()) else x.to(memory_format=LAST),
        "w": numbers(groups * outside, inside, *kernel, dtype=dtype, seed=1),
        "bias": numbers(groups * outside, dtype=dtype) if draw(st.booleans()) else None,
        "residual": draw(st.booleans()),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "static": draw(st.booleans()),
        "threads": draw(st.sampled_from([1, 2])),
        "stride": draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 3)])),
        "padding": draw(st.sampled_from([(0, 0), (1, 1), (kernel[0] // 2, kernel[1] // 2)])),
        "dilation": dilation,
        "groups": groups,
    }


@settings(max_examples=200, deadline=None)
@given(convolutions())
def test_equals_torch(call: dict) -> None:
    check(**call)


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_three_by_three_of_every_size(size: int, padding: int) -> None:
    """Tiles of two and of four outputs reach over edges in every way."""
    if size + 2 * padding < 3:
        return
    for channels in (16, 64):
        x = numbers(2, channels, size, size + 1).to(memory_format=LAST)
        check(x, numbers(channels, channels, 3, 3, seed=1), padding=padding, residual=True)


def test_a_residual_may_be_where_the_result_goes() -> None:
    x = numbers(2, 32, 12, 12).to(memory_format=LAST)
    check(x, numbers(32, 32, 3, 3, seed=1), in_place=True, activation="relu", padding=1)
    check(x, numbers(40, 32, 1, 1, seed=1), in_place=True, activation="relu")


def test_the_input_may_be_a_slice() -> None:
    whole = numbers(2, 32, 20, 20).to(memory_format=LAST)
    w = numbers(16, 16, 3, 3, seed=1)
    for x in (whole[:, 16:], whole[:, :16, 2:17, 3:], whole[:, ::2]):
        check(x, w, padding=1)
        check(x, w, stride=2)
        check(x, w[:, :, :1, :1])


def test_nan_reaches_what_it_touches_and_nothing_else() -> None:
    x = numbers(1, 16, 24, 24).to(memory_format=LAST)
    w = numbers(16, 16, 1, 1, seed=1)
    x[0, 3, 5, 6] = math.nan
    y = torch.empty(1, 16, 24, 24).to(memory_format=LAST)
    native_call("conv", {"activation": ACTIVATIONS.index("relu")}, [x, w, None, None], [y])
    assert y[0, :, 5, 6].isnan().all()
    assert y.isnan().sum() == 16


def test_both_numbers_of_threads_give_the_same() -> None:
    x = numbers(2, 64, 16, 16).to(memory_format=LAST)
    w = numbers(64, 64, 3, 3, seed=1)
    made = [torch.empty_like(x) for _ in range(2)]
    for threads, y in enumerate(made, 1):
        attrs = {"padding": (1, 1)}
        native_call("conv", attrs, [x, w, None, None], [y], static={1}, threads=threads)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (torch.zeros(1, 4, 5, 5), torch.zeros(1, 8, 5, 5), "channels of the result"),
        (torch.zeros(1, 4, 5, 5).half(), torch.zeros(1, 8, 5, 5).half(), "f32"),
        (torch.zeros(1, 4, 5), torch.zeros(1, 8, 5), "two-dimensional"),
    ],
)
def test_what_is_refused(x: torch.Tensor, y: torch.Tensor, said: str) -> None:
    w = torch.zeros(8, 4, *[1] * (x.dim() - 2), dtype=x.dtype)
    with pytest.raises(ExecError, match=said):
        native_call("conv", {}, [x, w, None, None], [y])


ALONE = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "activation": 0}


@pytest.mark.parametrize(
    ("attrs", "w", "bias", "y", "said"),
    [
        ({"groups": 0}, (8, 8, 1, 1), None, (1, 8, 4, 4), "not sane"),
        ({"groups": 3}, (8, 8, 1, 1), None, (1, 8, 4, 4), "divide"),
        ({"groups": 2}, (8, 8, 1, 1), None, (1, 8, 4, 4), "weight's channels"),
        ({"stride": (-1, 1)}, (8, 8, 1, 1), None, (1, 8, 4, 4), "not sane"),
        ({"dilation": (0, 1)}, (8, 8, 1, 1), None, (1, 8, 4, 4), "not sane"),
        ({"padding": (-1, 0)}, (8, 8, 1, 1), None, (1, 8, 2, 4), "not sane"),
        (
            {"padding": (2**30 - 4, 2**30 - 4), "stride": (2**31, 2**31)},
            (8, 8, 1, 1),
            None,
            (1, 8, 1, 1),
            "padded input",
        ),
        ({"activation": 99}, (8, 8, 1, 1), None, (1, 8, 4, 4), "activation"),
        ({}, (8, 8, 3, 3), None, (1, 8, 4, 4), "height or width"),
        ({}, (8, 8, 5, 5), None, (1, 8, 1, 1), "height or width"),
        ({}, (8, 4, 1, 1), None, (1, 8, 4, 4), "weight's channels"),
        ({}, (4, 8, 1, 1), None, (1, 8, 4, 4), "weight's channels"),
        ({}, (8,), None, (1, 8, 4, 4), "two-dimensional"),
        ({}, (8, 8, 1, 1), (1,), (1, 8, 4, 4), "bias"),
        ({}, (8, 8, 1, 1), (1, 8), (1, 8, 4, 4), "bias"),
        ({}, (8, 8, 1, 1), None, (2, 8, 4, 4), "batch"),
    ],
)
def test_sizes_of_no_convolution_are_refused(
    attrs: dict, w: tuple, bias: tuple | None, y: tuple, said: str
) -> None:
    """Each would read or write outside of the operands, or divide by zero."""
    x, made = (torch.zeros(shape).to(memory_format=LAST) for shape in ((1, 8, 4, 4), y))
    added = None if bias is None else torch.zeros(bias)
    with pytest.raises(ExecError, match=said):
        native_call("conv", {**ALONE, **attrs}, [x, torch.zeros(w), added, None], [made])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("shape", [(1, 64, 16, 16), (2, 128, 9, 7)])
def test_what_is_not_finite_spoils_what_it_touches_alone(
    value: float, shape: tuple[int, ...]
) -> None:
    """In Winograd's tiles too, whose sums mix it with outputs that it does not touch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(shape[1], 64, 3, padding=1), torch.nn.ReLU()).eval()
    x = torch.randn(shape)
    x[0, 3, 4, 5] = x[-1, 1, 0, 0] = value
    with torch.no_grad():
        expected = model(x)
    found = sw.compile(model, x)(x)
    for of in (torch.isnan, torch.isinf):
        assert torch.equal(of(found), of(expected))
    finite = expected.isfinite()
    assert_close(found[finite], expected[finite], 1e-5)


def test_what_a_convolution_works_in_is_part_of_the_plan_and_given_back() -> None:
    model = torch.nn.Conv2d(16, 16, 5, padding=2).eval()
    x = torch.randn(4, 16, 20, 20)
    program = sw.compile(model, x)
    plan = program.plan
    assert plan.work_bytes >= 4 * 16 * 24 * 24 * 4
    assert " KB to work in" in str(plan).splitlines()[0]
    assert plan.memory_bytes >= plan.arena_bytes + plan.work_bytes
    memory = program._latest.bound.executor.memory  # type: ignore[union-attr, attr-defined]
    arena = memory.held(0)
    assert arena.nbytes >= plan.memory_bytes
    with torch.no_grad():
        assert_close(program(x), model(x), 1e-5)
    given_back = weakref.ref(arena)
    del program, memory, arena
    gc.collect()
    assert given_back() is None
