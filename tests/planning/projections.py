"""Small graphs around a product with a stored weight, for tests of what is done with it."""

import torch

from shardwright.ir import Builder, IRGraph, IRValue


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def linear(builder: Builder, x: IRValue, name: str, columns: int, *, bias: bool = True) -> IRValue:
    """A linear layer with weights of its own."""
    weight = builder.param(f"{name}.weight", rand(columns, x.shape[-1]) / x.shape[-1])
    if not bias:
        return builder.call("aten.linear.default", x, weight)
    return builder.call(
        "aten.linear.default", x, weight, builder.param(f"{name}.bias", rand(columns))
    )


def addmm(builder: Builder, x: IRValue, name: str, columns: int) -> IRValue:
    """GPT-2's way to write a linear layer: rows and sequence in one dimension."""
    batch, length, width = x.shape
    rows = builder.call("aten.view.default", x, [batch * length, width])
    weight = builder.param(f"{name}.weight", rand(width, columns) / width)
    bias = builder.param(f"{name}.bias", rand(columns))
    y = builder.call("aten.addmm.default", bias, rows, weight)
    return builder.call("aten.view.default", y, [batch, length, columns])


def thirds(builder: Builder, y: IRValue, heads: int) -> list[IRValue]:
    """Three neighbours of columns, each as heads."""
    batch, length, columns = y.shape
    width = columns // 3
    parts = builder.call("aten.split.Tensor", y, width, -1)
    return [
        builder.call(
            "aten.transpose.int",
            builder.call("aten.view.default", part, [batch, length, heads, width // heads]),
            1,
            2,
        )
        for part in parts
    ]


def stacked(builder: Builder, y: IRValue, heads: int) -> list[IRValue]:
    """Three in a dimension of their own, brought to the front and unbound."""
    batch, length, columns = y.shape
    y = builder.call("aten.view.default", y, [batch, length, 3, heads, columns // 3 // heads])
    return builder.call(
        "aten.unbind.int", builder.call("aten.permute.default", y, [2, 0, 3, 1, 4]), 0
    )


def interleaved(builder: Builder, y: IRValue, heads: int) -> list[IRValue]:
    """Three in each head."""
    batch, length, columns = y.shape
    y = builder.call("aten.view.default", y, [batch, length, heads, columns // heads])
    return builder.call("aten.chunk.default", builder.call("aten.transpose.int", y, 1, 2), 3, -1)


def attention(builder: Builder, query: IRValue, key: IRValue, value: IRValue) -> IRValue:
    """Heads that look at each other, and side by side again."""
    batch, heads, length, width = query.shape
    y = builder.call("aten.scaled_dot_product_attention.default", query, key, value)
    y = builder.call("aten.transpose.int", y, 1, 2)
    return builder.call("aten.reshape.default", y, [batch, length, heads * width])


def norm(builder: Builder, x: IRValue, name: str) -> IRValue:
    """A layer norm over the last dimension."""
    width = x.shape[-1]
    scale, shift = (builder.param(f"{name}.{end}", rand(width)) for end in ("weight", "bias"))
    return builder.call("aten.layer_norm.default", x, [width], scale, shift)


def attending(product=linear, taken=thirds, *, heads: int = 4, width: int = 16) -> IRGraph:
    """Heads that attend, from a fused projection."""
    torch.manual_seed(0)
    builder = Builder("attending")
    x = builder.input("x", (2, 6, width), "f64")
    parts = taken(builder, product(builder, x, "qkv", 3 * width), heads)
    return builder.finish(linear(builder, attention(builder, *parts), "out", width))


def transformer(
    layers: int = 2, *, product=addmm, taken=thirds, heads: int = 4, width: int = 16, batch: int = 2
) -> IRGraph:
    """A tied language model of pre-norm blocks with fused projections."""
    torch.manual_seed(0)
    builder = Builder("transformer")
    tokens = builder.input("tokens", (batch, 6), "i64")
    table = builder.param("embed.weight", rand(50, width))
    x = builder.call("aten.embedding.default", table, tokens)
    for i in range(layers):
        path = f"blocks.{i}"
        parts = taken(
            builder,
            product(builder, norm(builder, x, f"{path}.norm1"), f"{path}.qkv", 3 * width),
            heads,
        )
        y = product(builder, attention(builder, *parts), f"{path}.out", width)
        x = builder.call("aten.add.Tensor", x, y)
        y = product(builder, norm(builder, x, f"{path}.norm2"), f"{path}.up", 4 * width)
        y = product(builder, builder.call("aten.gelu.default", y), f"{path}.down", width)
        x = builder.call("aten.add.Tensor", x, y)
    return builder.finish(builder.call("aten.linear.default", norm(builder, x, "norm"), table))
