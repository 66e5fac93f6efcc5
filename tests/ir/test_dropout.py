import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.ir import DROPOUT, Builder, compile_graph, resolve
from shardwright.ir.dropout import dropout
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
