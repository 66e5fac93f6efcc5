"""Rows of operators that multiply and add along shared dimensions: products and attention.

    linear      a b k+, n k+, n -> a b n
    bmm         b m k+, b k+ n -> b m n

Where the product splits along what it sums over, each part's result is a term of the sum; a bias
is a term as well, and only one part adds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright.ops.call import (
    CatalogCall,
    Dims,
    Emitter,
    Inputs,
    Local,
    OperatorRow,
    Rule,
    Shape,
    SplitRule,
    letters,
    table,
    text,
)


def contraction(
    call: CatalogCall,
    inputs: Sequence[Dims],
    output: Dims,
    *,
    terms: Sequence[int] = (),
    optional: dict[int, str] | None = None,
) -> Rule:
    """A sum of products over the names that the output lacks, plus the terms.

    Each tensor's names stand for its dimensions; sizes of 1 beside longer ones are broadcast.
    """
    lengths: dict[str, int] = {}
    for names, shape in zip(inputs, call.inputs, strict=True):
        for name, size in zip(names, shape, strict=True):
            lengths[name] = max(size, lengths.get(name, 1))

    def written(names: Dims, shape: Sequence[int]) -> Dims:
        return [
            "1" if size == 1 else name if name in output else f"{name}+"
            for name, size in zip(names, shape, strict=True)
        ]

    factors = [idx for idx in range(len(inputs)) if idx not in terms]
    return Rule(
        text(
            [written(*pair) for pair in zip(inputs, call.inputs, strict=True)],
            [["1" if lengths[name] == 1 else name for name in output]],
        ),
        terms=frozenset(terms),
        optional=optional or {},
        linear=tuple((idx, *terms) for idx in factors),
    )


def linear(call: CatalogCall) -> Rule:
    """Rows times the transposed weight, plus a bias."""
    lead = letters(len(call.inputs[0]) - 1, without="kn")
    columns = ["n"] if len(call.inputs[1]) == 2 else []
    return biased(call, [[*lead, "k"], [*columns, "k"]], lead + columns, columns)


def bilinear(call: CatalogCall) -> Rule:
    """Rows of two inputs through one matrix for each column of the output, plus a bias."""
    lead = letters(len(call.inputs[0]) - 1, without="ijn")
    return biased(call, [[*lead, "i"], [*lead, "j"], ["n", "i", "j"]], [*lead, "n"], ["n"])


def biased(call: CatalogCall, inputs: list[Dims], output: Dims, columns: Dims) -> Rule:
    """A contraction plus a bias, where the call has one."""
    if not call.has("bias"):
        return contraction(call, inputs, output)
    bias = len(inputs)
    return contraction(call, [*inputs, columns], output, terms=[bias], optional={bias: "bias"})


def matmul(call: CatalogCall) -> Rule:
    """As torch.matmul: vectors, matrices, and stacks of matrices that are broadcast."""
    left, right = call.inputs
    stack = letters(max(len(left), len(right), 2) - 2, without="mkn")
    rows = ["m"] if len(left) > 1 else []
    columns = ["n"] if len(right) > 1 else []
    inputs = [
        [*stack[len(stack) - max(len(left) - 2, 0) :], *rows, "k"],
        [*stack[len(stack) - max(len(right) - 2, 0) :], "k", *columns],
    ]
    return contraction(call, inputs, stack + rows + columns)


def product(equation: str, *, terms: Sequence[int] = ()) -> SplitRule:
    """A rule for an operator of fixed ranks; terms are broadcast to the output from the right."""
    left, output = equation.split(" -> ")
    sides = [side.split() for side in left.split(", ")]

    def rule(call: CatalogCall) -> Rule:
        pairs = zip(sides, call.inputs, strict=True)
        inputs = [names[len(names) - len(shape) :] for names, shape in pairs]
        return contraction(call, inputs, output.split(), terms=terms)

    return rule


def einsum(call: CatalogCall) -> Rule:
    """The equation, with or without spaces; an ellipsis is written out."""
    *inputs, output = einsum_names(call)
    return contraction(call, inputs, output)


def einsum_names(call: CatalogCall) -> list[Dims]:
    """The names of each input's dimensions, then of the output's."""
    equation = str(call.attrs["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    sides = left.split(",")
    ranks = [
        len(shape) - len(side.replace("...", ""))
        for side, shape in zip(sides, call.inputs, strict=True)
    ]
    dots = [f"_{i}" for i in range(max(ranks))]
    if not arrow:
        singles = sorted({c for c in left if c.isalpha() and left.count(c) == 1})
        right = ("..." if "..." in left else "") + "".join(singles)

    def names(side: str, rank: int) -> Dims:
        before, ellipsis, after = side.partition("...")
        return [*before, *(dots[len(dots) - rank :] if ellipsis else []), *after]

    inputs = [names(side, rank) for side, rank in zip(sides, ranks, strict=True)]
    return [*inputs, names(right, len(dots))]


def attention(call: CatalogCall) -> Rule | None:
    """Stacks of queries over keys and values: everything splits but keys and what is compared.

    With grouped queries the heads are ``(h g)``: g query heads to each key head.
    """
    if call.attrs["dropout_p"] > 0:
        return None
    query, key, value, *mask = call.inputs
    lead = letters(len(query) - 2, without="ldshge")
    full = call.outputs[0][:-2]

    def stacked(shape: Sequence[int], names: Dims, last: Dims) -> Dims:
        """Dimensions before the last two, of which those of size 1 are broadcast."""
        sizes = shape[:-2]
        names = names[len(names) - len(sizes) :]
        return ["1" if size == 1 else n for size, n in zip(sizes, names, strict=True)] + last

    heads = shared = lead
    lengths = {}
    if call.attrs["enable_gqa"] and lead and full[-1] != key[-3]:
        lengths = {"h": key[-3], "g": full[-1] // key[-3]}
        heads = [*lead[:-1], "(h g)" if key[-3] > 1 else "g"]
        shared = [*lead[:-1], "h"]
    inputs = [
        stacked(query, heads, ["l", "d^"]),
        stacked(key, shared, ["s^", "d^"]),
        stacked(value, shared, ["s^", "e"]),
    ]
    for shape in mask:
        rows = ["1" if shape[-2] == 1 else "l", "1" if shape[-1] == 1 else "s^"]
        inputs.append(stacked(shape, heads, rows))
    output = ["1" if size == 1 else n for size, n in zip(full, heads, strict=True)]
    return Rule(
        text(inputs, [[*output, "l", "e"]]),
        lengths=lengths,
        emit=causal_part if call.attrs["is_causal"] else None,
        linear=((2,),),
    )


def causal_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """Part of the queries sees the keys up to its own positions, counted in the whole."""
    if "l" not in local.cuts:
        return None
    attrs = {**local.call.attrs, "is_causal": False}
    del attrs["attn_mask"]
    seen = e.call("aten.ones.default", [local.lengths["l"], local.lengths["s"]], dtype=torch.bool)
    mask = e.call("aten.tril.default", seen, local.start("l"))
    return e.emit(local.call.op, [*inputs, mask], attrs)


def grouped_matmul(call: CatalogCall) -> Rule:
    """Rows in groups, each times the matrix of its group; offsets say where groups end."""
    return Rule("m^ k+, e^ k+ n, e^ -> m^ n", linear=((0,), (1,)))


# --- arithmetic ---------------------------------------------------------------------------------


def summed_last(idx: int) -> Callable[[CatalogCall], int]:
    """Operations of a product that sums over the last dimension of input ``idx``."""
    return lambda call: 2 * math.prod(call.outputs[0]) * call.inputs[idx][-1]


def einsum_flops(call: CatalogCall) -> int:
    """Two operations a point of the space that all indices span."""
    sizes: dict[str, int] = {}
    for names, shape in zip(einsum_names(call), call.inputs, strict=False):
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    return 2 * math.prod(sizes.values())


def attention_flops(call: CatalogCall) -> int:
    """Queries times keys, and what comes of it times values."""
    return _attention_flops(*call.inputs[:3])


def attention_backward_flops(call: CatalogCall) -> int:
    """As much as the forward for each of three gradients; the output's is the first input."""
    return 3 * _attention_flops(*call.inputs[1:4])


def _attention_flops(query: Shape, key: Shape, value: Shape) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


ATTENTION = 0.45
"""The efficiency of attention; from times of a CPU core."""

ROWS: Mapping[str, OperatorRow] = {
    **table(linear, "linear", flops=summed_last(1)),
    **table(matmul, "matmul", flops=summed_last(0)),
    **table(product("m k, k n -> m n"), "mm", flops=summed_last(0)),
    **table(product("b m k, b k n -> b m n"), "bmm", flops=summed_last(0)),
    **table(product("m k, k -> m"), "mv", flops=summed_last(0)),
    **table(product("k, k -> "), "dot", flops=summed_last(0)),
    **table(product("m, n -> m n"), "outer"),
    **table(product("m n, m k, k n -> m n", terms=[0]), "addmm", flops=summed_last(1)),
    **table(product("m, m k, k -> m", terms=[0]), "addmv"),
    **table(product("b m n, b m k, b k n -> b m n", terms=[0]), "baddbmm", flops=summed_last(1)),
    **table(product("m n, b m k, b k n -> m n", terms=[0]), "addbmm"),
    **table(bilinear, "bilinear"),
    **table(einsum, "einsum", flops=einsum_flops),
    **table(attention, "scaled_dot_product_attention", flops=attention_flops, efficiency=ATTENTION),
    **table(
        None,
        """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention
        """,
        flops=attention_flops,
        efficiency=ATTENTION,
    ),
    **table(
        None,
        """
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention_backward
        """,
        flops=attention_backward_flops,
        efficiency=ATTENTION,
    ),
    "transformers.grouped_mm_fallback.default": OperatorRow(grouped_matmul),
}
