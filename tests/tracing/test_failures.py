"""What cannot be a graph: one error, with the line and what to do, and nothing printed."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows
from torch.nn.attention.flex_attention import flex_attention

from shardwright.errors import CaptureError
from shardwright.tracing import capture
from tests.tracing.equality import captured


def helper_that_branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def branch(m: Any, x: Any) -> Any:
    return helper_that_branches(m.linear(x))


def loop(m: Any, x: Any) -> Any:
    while x.max() > 1:
        x = x / 2
    return x


def number(m: Any, x: Any) -> Any:
    return x * x.sum().item()


def listed(m: Any, x: Any) -> Any:
    return x * x[0].tolist()[0]


def selection(m: Any, x: Any) -> Any:
    return x[x > 0]


def nonzero(m: Any, x: Any) -> Any:
    return x.nonzero().sum()


def numpy_array(m: Any, x: Any) -> Any:
    return x + torch.from_numpy(np.abs(x.detach().numpy()))


def data(m: Any, x: Any) -> Any:
    y = x * 2
    y.data.add_(1)
    return y


def wrong_shape(m: Any, x: Any) -> Any:
    return m.linear(x.t())


@pytest.mark.parametrize(
    ("function", "line", "advice"),
    [
        (branch, "if x.sum() > 0:", "torch.where"),
        (loop, "while x.max() > 1:", "torch.where"),
        (number, "return x * x.sum().item()", "keep it a tensor"),
        (listed, "return x * x[0].tolist()[0]", "keep it a tensor"),
        (selection, "return x[x > 0]", "use masks"),
        (nonzero, "return x.nonzero().sum()", "use masks"),
        (numpy_array, "return x + torch.from_numpy(np.abs(x.detach().numpy()))", "numpy"),
        (data, "", "x.detach()"),
        (wrong_shape, "return m.linear(x.t())", "the model raised this"),
    ],
)
def test_line_and_advice(
    function: Callable[..., Any], line: str, advice: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError, match=re.escape(advice)) as caught:
        captured(function, torch.randn(3, 4))
    assert not any(capfd.readouterr())
    if line:
        file, number, rest = str(caught.value).split(":", 2)
        assert file == __file__
        source, _ = inspect.getsourcelines(inspect.getmodule(test_line_and_advice) or branch)
        assert source[int(number.split()[0]) - 1].strip() == line
        assert f"`{line}`" in f"{number}:{rest}"


HIGHER_ORDER: dict[str, tuple[Callable[..., Any], str]] = {
    "cond": (lambda m, x: torch.cond(x.sum() > 0, torch.neg, torch.abs, (x,)), "torch.where"),
    "while_loop": (
        lambda m, x: while_loop(lambda x: x.sum() > 0, lambda x: (x - 1,), (x,)),
        "write the loop out",
    ),
    "map": (lambda m, x: map_rows(torch.neg, x), "write the loop out"),
    "scan": (
        lambda m, x: scan(lambda carry, row: (carry + row, row.clone()), x[0].clone(), x)[1],
        "write the loop out",
    ),
    "associative_scan": (
        lambda m, x: associative_scan(torch.add, x, 0, combine_mode="generic"),
        "write the batch dimension out",
    ),
    "flex_attention": (
        lambda m, x: flex_attention(*[x.view(1, 1, 3, 4)] * 3),
        "use scaled_dot_product_attention",
    ),
}


@pytest.mark.parametrize("name", HIGHER_ORDER)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_functions_that_run_functions(name: str) -> None:
    """Refused with the line before torch.compile works, and says things, on any of it."""
    function, advice = HIGHER_ORDER[name]
    with pytest.raises(CaptureError, match=re.escape(advice)) as caught:
        captured(function, torch.randn(3, 4))
    assert str(caught.value).startswith(f"{__file__}:")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_parts_of_a_model() -> None:
    """Torch 2.9 may go on compiling while a program is traced; newer releases leave it out."""
    model, x = nn.Sequential(torch.compile(nn.Linear(4, 4))), torch.ones(3, 4)
    try:
        graph = capture(model, (x,))
    except CaptureError as error:
        if not (torch.__version__ < "2.13" and "_orig_mod" in str(error)):
            raise
    else:
        assert [node.op for node in graph.nodes] == ["aten.linear.default"]


def test_errors_keep_no_tensors_of_the_tracer_alive() -> None:
    with pytest.raises(CaptureError) as caught:
        captured(branch, torch.randn(3, 4))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_result_that_holds_an_object_is_refused() -> None:
    class DynamicCache:
        pass

    with pytest.raises(CaptureError, match="use_cache=False"):
        captured(lambda m, x: (x + 1, DynamicCache()), torch.ones(2))
