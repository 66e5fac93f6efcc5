"""Functions of vectors of floats, by chains of one operator, against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch

from shardwright.kernels.chains import OPERATORS
from tests.kernels.native.calls import native_call

FUNCTIONS = ["exp", "expm1", "log", "log1p", "log2", "tanh", "sigmoid", "erf", "sin", "cos"]
FUNCTIONS += ["sqrt", "rsqrt", "reciprocal", "silu", "gelu", "gelu_tanh"]
# Where the error of an argument in f32 counts: x (1 + tanh u) far below 0, and denormal factors.
LOOSE = {"gelu_tanh": 2e-5, "silu": 1e-5}
SMALLEST = torch.finfo(torch.float32).tiny


def run(name: str, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    y = torch.empty_like(x)
    native_call("chain", {"program": f"{name} x0 -> %0"}, [x], [y])
    return y


def exact(name: str, x: torch.Tensor) -> torch.Tensor:
    """In f64, written so that it is exact to more than f32's digits everywhere."""
    wide = x.double()
    if name == "gelu":
        return wide * 0.5 * torch.erfc(-wide * math.sqrt(0.5))
    if name == "gelu_tanh":
        return wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))
    result = OPERATORS[name].function(wide)
    assert isinstance(result, torch.Tensor)
    return result


def everywhere() -> torch.Tensor:
    """Floats of every exponent and both signs, denormals, a dense middle; not inf or NaN."""
    bits = torch.arange(-(2**31), 2**31, 60013, dtype=torch.int64).to(torch.int32)
    middle = torch.linspace(-20, 20, 40001)
    x = torch.cat([bits.view(torch.float32), middle, torch.tensor([0.0, 1.0, -1.0, 8192.0])])
    return x[x.isfinite()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_few_units_in_the_last_place_over_the_whole_range(name: str) -> None:
    x = everywhere()
    found, wide = run(name, x).double(), exact(name, x)
    expected = wide.float().double()  # inf where f32 has no such number
    special = ~expected.isfinite()
    if name in ("gelu", "gelu_tanh", "silu"):
        special &= x < 1e30
    torch.testing.assert_close(found[special], expected[special], equal_nan=True)
    rest = ~special & expected.isfinite()
    # Of numbers below the smallest normal one the last digits are not all there.
    error = (found - wide)[rest].abs() / wide[rest].abs().clamp_min(SMALLEST)
    worst = int(error.argmax())
    assert error[worst] <= LOOSE.get(name, 1e-6), f"{name}({x[rest][worst].item()})"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_zeros_infinities_and_nan(name: str) -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0])
    found, expected = run(name, x), OPERATORS[name].function(x)
    if name == "gelu":
        expected[2] = math.inf  # torch gives NaN here, and inf in f64
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=0)
    assert torch.equal(found[:2].signbit(), expected[:2].signbit())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_doubles(name: str) -> None:
    x = torch.linspace(-9, 9, 1003, dtype=torch.float64)
    expected = OPERATORS[name].function(x)
    torch.testing.assert_close(run(name, x), expected, equal_nan=True, rtol=1e-12, atol=1e-15)


GRADIENTS = {"tanh_bwd": torch.tanh, "sigmoid_bwd": torch.sigmoid}


@pytest.mark.parametrize("name", ["silu_bwd", "gelu_bwd", "gelu_tanh_bwd", *GRADIENTS])
def test_gradients(name: str) -> None:
    torch.manual_seed(0)
    x, dy = torch.linspace(-12, 12, 4001), torch.randn(4001)
    second = GRADIENTS[name](x) if name in GRADIENTS else x
    found = torch.empty_like(x)
    native_call("chain", {"program": f"{name} x0 x1 -> %0"}, [dy, second], [found])
    expected = OPERATORS[name].function(dy.double(), second.double())
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
