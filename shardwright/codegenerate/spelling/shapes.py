"""Rows of operators that change a shape, join tensors or take them apart; sizes are numbers.

view(x, [2, -1])            x.view(2, -1)
cat([x, y], 1)              torch.cat([x, y], dim=1)
split.Tensor(x, 4, -1)      torch.split(x, 4, dim=-1)
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.codegenerate.expression import Expression
from shardwright.codegenerate.spelling.arguments import IN_BRACKETS, Style, expression_of
from shardwright.codegenerate.spelling.call import Call, Row
from shardwright.codegenerate.spelling.forms import function, method, words

METHODS = words("""
    transpose.int expand_as.default squeeze.default squeeze.dim squeeze.dims
    unsqueeze.default movedim.int movedim.intlist swapaxes.default swapdims.default roll.default
    rot90.default narrow.default diagonal.default unfold.default as_strided.default view_as.default
    reshape_as.default t.default repeat_interleave.self_int tril.default triu.default
    diag_embed.default unbind.int chunk.default
""")
"""``x.name(…)``."""

SPREAD: Mapping[str, str] = {
    "view.default": "size",
    "reshape.default": "shape",
    "permute.default": "dims",
    "expand.default": "size",
    "repeat.default": "repeats",
    "tile.default": "dims",
    "flip.default": "dims",
}
"""``x.name(2, -1)``: methods that take a list as arguments of their own."""

FUNCTIONS = words("""
    cat.default stack.default hstack.default vstack.default dstack.default column_stack.default
    concat.default concatenate.default view_as_real.default view_as_complex.default kron.default
    slice_scatter.default select_scatter.default diagonal_scatter.default
    pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default
    tensor_split.sections tensor_split.indices
""")
"""``torch.name(…)``."""


def meshgrid(call: Call) -> Expression:
    """``torch.meshgrid(x, y, indexing="ij")``."""
    tensors = ", ".join(expression_of(item).text for item in call.arguments["tensors"])
    indexing = expression_of(call.arguments["indexing"])
    return Expression(f"torch.meshgrid({tensors}, indexing={indexing})")


_SPLIT = Style(rename={"split_size": "split_size_or_sections"}, brackets=True)

ROWS: dict[str, Row] = {
    **{f"aten.{name}": method(name.partition(".")[0]) for name in METHODS},
    **{
        f"aten.{name}": method(name.partition(".")[0], Style(spread=spread))
        for name, spread in SPREAD.items()
    },
    **{f"aten.{name}": function(f"torch.{name.partition('.')[0]}") for name in FUNCTIONS},
    "aten.unflatten.int": function("torch.unflatten"),
    "aten.view.dtype": method("view"),
    "aten.flatten.using_ints": method("flatten", Style(front=3)),
    "aten.split.Tensor": function("torch.split", IN_BRACKETS),
    "aten.split_with_sizes.default": function("torch.split", IN_BRACKETS),
    "aten.pad.default": function("F.pad"),
    "aten.meshgrid.indexing": meshgrid,
}
