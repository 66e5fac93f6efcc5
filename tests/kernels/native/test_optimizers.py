"""Native optimizers against torch.optim, and against torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call

Tensors = list[torch.Tensor]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
SIZES = ((7,), (64,), (33, 129), (1,), (300, 200), (16, 8, 3, 3))


def draw(dtype: torch.dtype, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, dtype=dtype, generator=generator) for size in SIZES]


def close(found: Tensors, expected: Tensors, tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        scale = b.detach().abs().max().item()
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=tolerance * scale)


class Adam:
    """An optimizer out of the two native kinds."""

    def __init__(self, kind: str, parameters: Tensors, lr: float, attrs: dict[str, Any]) -> None:
        self.kind, self.attrs, self.parameters = kind, attrs, parameters
        self.lr = torch.tensor(lr, dtype=torch.float64)
        self.averages = [torch.zeros_like(p) for p in parameters]
        self.squares = [torch.zeros_like(p) for p in parameters]
        self.largest: list[torch.Tensor | None] = [
            torch.zeros_like(p) if attrs.get("amsgrad") else None for p in parameters
        ]
        self.steps = [torch.zeros(()) for _ in parameters]

    def step(self, gradients: Tensors, threads: int = 1) -> None:
        native_call("step_inc", {"by": 1.0}, self.steps, self.steps)
        renewed = [*self.parameters, *self.averages, *self.squares, *self.largest]
        inputs = [*self.parameters, *gradients, *renewed[len(gradients) :], *self.steps, self.lr]
        native_call(self.kind, self.attrs, inputs, renewed, threads=threads)


class Sgd:
    def __init__(self, kind: str, parameters: Tensors, lr: float, attrs: dict[str, Any]) -> None:
        self.kind, self.attrs, self.parameters = kind, attrs, parameters
        self.lr = torch.tensor(lr, dtype=torch.float64)
        self.momentums: list[torch.Tensor | None] = [
            torch.zeros_like(p) if attrs.get("momentum") else None for p in parameters
        ]

    def step(self, gradients: Tensors, threads: int = 1) -> None:
        renewed = [*self.parameters, *self.momentums]
        inputs = [*self.parameters, *gradients, *self.momentums, self.lr]
        native_call(self.kind, self.attrs, inputs, renewed, threads=threads)


def hundred_steps(
    native: Adam | Sgd, theirs: Callable[..., Any], dtype: torch.dtype, **options: Any
) -> None:
    """Both learn from the same gradients, which depend on the parameters' drawn path only."""
    expected = [p.clone().requires_grad_() for p in native.parameters]
    optimizer = theirs(expected, **options)
    for step in range(100):
        gradients = [0.3 * g for g in draw(dtype, step + 1)]
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        native.step(gradients)
    close(native.parameters, expected, TOLERANCE[dtype])


ADAM_CASES: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.01},
    {"weight_decay": 0.1, "amsgrad": True},
    {"maximize": True, "betas": (0.3, 0.99), "eps": 1e-6},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", ADAM_CASES)
@pytest.mark.parametrize(("kind", "theirs"), [("adam", "Adam"), ("adamw", "AdamW")])
def test_adam_is_torchs_over_100_steps(
    kind: str, theirs: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    options = {"weight_decay": 0.0, **options}
    attrs = {k: v for k, v in options.items() if k != "betas"}
    if "betas" in options:
        attrs["beta1"], attrs["beta2"] = options["betas"]
    native = Adam(kind, draw(dtype), 1e-2, attrs)
    hundred_steps(native, getattr(torch.optim, theirs), dtype, lr=1e-2, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.8, "maximize": True},
    ],
)
def test_sgd_is_torchs_over_100_steps(options: dict[str, Any], dtype: torch.dtype) -> None:
    native = Sgd("sgd", draw(dtype), 1e-2, options)
    hundred_steps(native, torch.optim.SGD, dtype, lr=1e-2, **options)


def test_dampening_acts_on_every_gradient_that_enters_the_momentum() -> None:
    parameters, gradients = draw(torch.float64), draw(torch.float64, 1)
    native = Sgd("sgd", [p.clone() for p in parameters], 0.1, {"momentum": 0.9, "dampening": 0.4})
    momentums = draw(torch.float64, 2)
    native.momentums = list(momentums)
    expected = [0.9 * m + 0.6 * g for m, g in zip(momentums, gradients, strict=True)]
    native.step(gradients)
    close([m for m in native.momentums if m is not None], expected, 1e-15)
    moved = [p - 0.1 * m for p, m in zip(parameters, expected, strict=True)]
    close(native.parameters, moved, 1e-15)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    steps=st.lists(st.integers(1, 2000), min_size=6, max_size=6),
    decoupled=st.booleans(),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    decay=st.sampled_from([0.0, 0.05]),
    single=st.booleans(),
    apart=st.booleans(),
    bad=st.sampled_from([None, float("nan"), float("inf")]),
)
def test_one_step_is_the_fused_kernels(
    sizes: list[int],
    steps: list[int],
    decoupled: bool,
    amsgrad: bool,
    maximize: bool,
    decay: float,
    single: bool,
    apart: bool,
    bad: float | None,
) -> None:
    """Every option, counters that differ, outputs in place or apart, NaN and inf."""
    dtype = torch.float32 if single else torch.float64
    generator = torch.Generator().manual_seed(sum(sizes))

    def tensors() -> Tensors:
        return [torch.randn(n, dtype=dtype, generator=generator) for n in sizes]

    parameters, gradients, averages = tensors(), tensors(), tensors()
    squares = [t.square() for t in tensors()]
    largest = [t.square() for t in tensors()] if amsgrad else [None] * len(sizes)
    if bad is not None:
        gradients[0][0] = bad
    counters = [torch.tensor(float(steps[i])) for i in range(len(sizes))]
    lr = torch.tensor(0.02, dtype=dtype)
    renewed: list[torch.Tensor | None] = [*parameters, *averages, *squares, *largest]
    made = [t if t is None else t.clone() for t in renewed]
    old = renewed if apart else made
    inputs = [*old[: len(sizes)], *gradients, *old[len(sizes) :], *counters, lr]
    attrs = {"weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
    native_call("adamw" if decoupled else "adam", attrs, inputs, made)

    fused = torch.ops.aten._fused_adamw_ if decoupled else torch.ops.aten._fused_adam_
    fused.tensor_lr(
        parameters,
        gradients,
        averages,
        squares,
        [t for t in largest if t is not None],
        counters,
        lr=lr,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        **attrs,
    )
    if bad is not None and largest[0] is not None:
        largest[0][0] = bad  # torch's vectors keep a NaN, its last elements by themselves lose it
    for found, expected in zip(made, [*parameters, *averages, *squares, *largest], strict=True):
        if found is not None and expected is not None:
            finite = expected.isfinite()
            torch.testing.assert_close(found[~finite], expected[~finite], equal_nan=True)
            if finite.any():
                close([found[finite]], [expected[finite]], 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_threads_cut_large_tensors_and_change_nothing(kind: str) -> None:
    attrs = {"weight_decay": 0.1, **({"momentum": 0.9} if kind == "sgd" else {})}
    made = []
    for threads in (1, 2, 3):
        torch.manual_seed(0)
        parameters = [torch.randn(n) for n in (50_001, 3, 17, 40_000, 5)]
        gradients = [torch.randn_like(p) for p in parameters]
        optimizer = (Sgd if kind == "sgd" else Adam)(kind, parameters, 0.1, attrs)
        optimizer.step(gradients, threads)
        made.append(parameters)
    for others in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], others, strict=True))


def test_parameters_of_any_dense_layout() -> None:
    parameter = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
    gradient = torch.randn_like(parameter)
    expected = parameter - 0.5 * gradient
    native_call("sgd", {}, [parameter, gradient, None, torch.tensor(0.5)], [parameter, None])
    torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize(
    ("gradient", "why"),
    [
        (torch.zeros(4, 3).t(), "strides"),
        (torch.zeros(3, 4, dtype=torch.float64), "dtypes"),
        (torch.zeros(3, 8)[:, ::2], "strides"),
        (None, "absent"),
    ],
)
def test_operands_that_are_not_alike_are_refused(gradient: torch.Tensor | None, why: str) -> None:
    parameter = torch.zeros(3, 4)
    with pytest.raises(ExecError, match=why):
        native_call("sgd", {}, [parameter, gradient, None, torch.tensor(0.1)], [parameter, None])


def test_a_momentum_that_is_asked_for_must_be_there() -> None:
    parameter = torch.zeros(3)
    with pytest.raises(ExecError, match="absent"):
        native_call(
            "sgd",
            {"momentum": 0.9},
            [parameter, parameter, None, torch.tensor(0.1)],
            [parameter, None],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_step_counters_advance_in_place_and_apart(dtype: torch.dtype) -> None:
    counters = [torch.tensor(3, dtype=dtype), torch.tensor([40], dtype=dtype)]
    made = [torch.empty_like(c) for c in counters]
    native_call("step_inc", {"by": 2.0}, counters, made)
    native_call("step_inc", {"by": 1.0}, counters, counters)
    assert [c.item() for c in counters] == [4, 41]
    assert [c.item() for c in made] == [5, 42]


def test_a_list_that_the_rule_does_not_use_is_refused() -> None:
    """What renews it would be left unwritten."""
    p, made, lr = torch.zeros(3), [torch.zeros(3) for _ in range(4)], torch.tensor(0.1)
    with pytest.raises(ExecError, match="do not ask for"):
        native_call("sgd", {}, [p, p, p, lr], made[:2])
    attrs = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    with pytest.raises(ExecError, match="do not ask for"):
        native_call("adam", attrs, [p, p, p, p, p, torch.tensor(1.0), lr], made)
