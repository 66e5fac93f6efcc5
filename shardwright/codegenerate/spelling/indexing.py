"""Rows of operators that pick, and write to, places: subscripts where they capture back.

    select.int(x, 1, 0)              x[:, 0]
    slice.Tensor(x, 2, 1, 5)         x[..., 1:5]
    index.Tensor(x, [None, i])       x[:, i]
    gather(x, 1, i)                  x.gather(1, i)

A subscript says a dimension from the front, and Python leaves out a slice that takes all; what it
cannot say is a method, or the overload's own name.
"""

from __future__ import annotations

from shardwright.codegenerate.expression import Binding, Expression
from shardwright.codegenerate.spelling.arguments import Style, expression_of
from shardwright.codegenerate.spelling.call import Call, Operand, Row
from shardwright.codegenerate.spelling.forms import first_of, function, method, words

TO_THE_END = 2**63 - 1
"""Where a slice without an end stops."""

METHODS = words("""
    index_select.default gather.default scatter.src scatter.value scatter_add.default
    scatter_reduce.two index_add.default index_copy.default index_fill.int_Scalar
    index_fill.int_Tensor masked_scatter.default take_along_dim.default
""")


def select(call: Call) -> Expression | None:
    """``x[:, 0]``."""
    dim, index = call.arguments["dim"], call.arguments["index"]
    return None if dim < 0 else _subscript(call, dim, str(index))


def slice_(call: Call) -> Expression | None:
    """``x[:, 1:5]``, ``x[..., ::2]``."""
    dim, start, end, step = (call.arguments[name] for name in ("dim", "start", "end", "step"))
    length = call.operand("self").value.shape[dim]
    takes_all = start == 0 and end is not None and end >= length and step == 1
    if dim < 0 or start is None or end is None or takes_all:
        return None
    texts = ["" if start == 0 else str(start), "" if end == TO_THE_END else str(end)]
    return _subscript(call, dim, ":".join(texts + ([str(step)] if step != 1 else [])))


def _subscript(call: Call, dim: int, text: str) -> Expression:
    """``x[:, text]``, with dots for what stands before the last dimension."""
    x = call.operand("self")
    rank = len(x.value.shape)
    before = ["..."] if dim == rank - 1 and dim > 1 else [":"] * dim
    return _subscripted(x, [*before, text])


def _subscripted(x: Operand, places: list[str]) -> Expression:
    return Expression(f"{x.expression.inside(Binding.ATOM)}[{', '.join(places)}]")


def index(call: Call) -> Expression | None:
    """``x[i]``, ``x[:, i, j]``; of whole numbers, or of bools."""
    indices = call.arguments["indices"]
    if not indices or indices[-1] is None or not all(map(_is_index, indices)):
        return None
    places = [":" if item is None else expression_of(item).text for item in indices]
    return _subscripted(call.operand("self"), places)


def _is_index(item: Operand | None) -> bool:
    """Whether Python takes it as an index and nothing else; a number selects."""
    return item is None or (item.value.shape != () and item.value.dtype in ("i64", "i32", "bool"))


def index_put(call: Call) -> Expression | None:
    """``x.index_put((i, j), values)``."""
    if any(item is None for item in call.arguments["indices"]):
        return None
    return method("index_put")(call)


ROWS: dict[str, Row] = {
    **{f"aten.{name}": method(name.partition(".")[0]) for name in METHODS},
    "aten.select.int": first_of(select, method("select")),
    "aten.slice.Tensor": slice_,
    "aten.index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten.take.default": function("torch.take"),
    "aten.searchsorted.Tensor": function("torch.searchsorted"),
    "aten.bucketize.Tensor": function("torch.bucketize"),
    "aten.one_hot.default": function("F.one_hot", Style(front=2)),
    "aten.embedding.default": function(
        "F.embedding",
        Style(order=("indices", "weight", "padding_idx", "scale_grad_by_freq", "sparse")),
    ),
}
