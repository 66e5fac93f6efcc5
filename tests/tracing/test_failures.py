"""What cannot be a graph: one error, with the line and what to do, and nothing printed."""

import inspect
import linecache
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
from shardwright.ir.values import Source
from shardwright.tracing import CaptureWarning, capture, compile_ir
from shardwright.tracing.failures import harmless_answer
from tests.tracing.equality import Module, captured


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


# --- branches on contents -------------------------------------------------------------------------


def raises_at_once(m: Any, x: Any) -> Any:
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    return x * 2


def raises_with_a_message(m: Any, x: Any) -> Any:
    if x.max() > 1e9 or x.min().item() < -1e9:
        where = "out of range"
        raise ValueError(where)
    return x * 2


def asserts(m: Any, x: Any) -> Any:
    assert (x.abs() < 1e9).all() and x.sum() < 1e9, "out of range"  # noqa: PT018
    return x * 2


def raises_in_the_other_branch(m: Any, x: Any) -> Any:
    if torch.isfinite(x).all():
        x = x * 2
    else:
        raise ValueError("not finite")
    return x


def checks_by_torch(m: Any, x: Any) -> Any:
    torch._check_tensor_all(x.sum() > -1e9)
    return x * 2


def checks_a_number(m: Any, x: Any) -> Any:
    torch._check(x.sum().item() < 1e9)
    return x * 2


@pytest.mark.parametrize(
    "function",
    [
        raises_at_once,
        raises_with_a_message,
        asserts,
        raises_in_the_other_branch,
        checks_by_torch,
        checks_a_number,
    ],
    ids=lambda function: function.__name__,
)
def test_checks_are_left_out_with_a_warning(function: Any) -> None:
    x = torch.ones(2, 4)
    line = function.__code__.co_firstlineno + 1
    with pytest.warns(CaptureWarning, match=rf"test_failures.py:{line}.*without the check"):
        graph = capture(Module(function), (x,))
    assert [node.op for node in graph.nodes] == ["aten.mul.Tensor"]
    assert torch.equal(graph.run(x), x * 2)


def test_a_step_may_check_its_labels() -> None:
    model, loss_of = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 3:
            raise ValueError("no such class")
        optimizer.zero_grad()
        loss: torch.Tensor = loss_of(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    with pytest.warns(CaptureWarning, match="labels.max"):
        graph = compile_ir(step, torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))
    assert [node.op for node in graph.nodes][-2:] == ["Backward", "sgd_step"]


def test_a_mask_of_a_transformer_may_be_a_causal_one() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).eval()
    x, mask = torch.randn(2, 4, 8), nn.Transformer.generate_square_subsequent_mask(4)
    graph = capture(model, (x, x), {"tgt_mask": mask, "src_mask": mask})
    for given in (mask, torch.zeros(4, 4)):
        masks = {"tgt_mask": given, "src_mask": given}
        torch.testing.assert_close(graph.run(x, x, **masks), model(x, x, **masks))


@pytest.mark.parametrize(
    ("statement", "answer"),
    [
        ("if a: raise E", False),
        ("if not a: raise E", True),
        ("if not (a and not not b): raise E", True),
        ("assert not a", False),
        ("if a:\n    x = 1\nelse: raise E", True),
        ("if a and not b: raise E", None),
        ("if a: x = 1", None),
        ("if a:\n    if b: return\n    raise E", None),
        ("while a: x = 1", None),
        ("x = a", None),
    ],
)
def test_an_answer_is_given_where_the_other_way_raises(statement: str, answer: bool | None) -> None:
    file = f"<value check {statement}>"
    text = f"def f(a, b, E):\n    {statement.replace(chr(10), chr(10) + '    ')}\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    assert harmless_answer(Source(file, 2)) is answer


def test_a_branch_of_which_both_ways_go_on_is_refused() -> None:
    def function(m: Any, x: Any) -> Any:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(CaptureError, match="branches on the contents"):
        capture(Module(function), (torch.ones(2, 4),))
