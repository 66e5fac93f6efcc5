"""Small graphs written by hand, for tests of whatever comes after capture."""

import torch

from shardwright.ir import Builder, IRGraph, IRValue


def block(builder: Builder, x: IRValue, path: str, width: int) -> IRValue:
    """A residual block of nine nodes."""

    def weight(name: str, *shape: int) -> IRValue:
        return builder.param(f"{path}.{name}", torch.randn(*shape, dtype=torch.float64) / width)

    with builder.scope(path, "tests.Block"):
        y = builder.call("aten.layer_norm.default", x, [width], weight("norm1.weight", width))
        y = builder.call("aten.linear.default", y, weight("mix.weight", width, width))
        y = builder.call("aten.softmax.int", y, -1)
        x = builder.call("aten.add.Tensor", x, y)
        y = builder.call("aten.layer_norm.default", x, [width], weight("norm2.weight", width))
        y = builder.call("aten.linear.default", y, weight("up.weight", 4 * width, width))
        y = builder.call("aten.gelu.default", y)
        y = builder.call("aten.linear.default", y, weight("down.weight", width, 4 * width))
        return builder.call("aten.add.Tensor", x, y)


def language_model(
    layers: int = 4,
    width: int = 8,
    vocabulary: int = 50,
    *,
    classes: int | None = None,
    tied: bool = False,
) -> IRGraph:
    """An embedding, ``layers`` equal blocks and an output layer of ``classes``, or tied."""
    torch.manual_seed(0)
    builder = Builder("language_model")
    tokens = builder.input("tokens", (2, 3), "i64")
    table = builder.param("embed.weight", torch.randn(vocabulary, width, dtype=torch.float64))
    x = builder.call("aten.embedding.default", table, tokens)
    x = builder.call("aten.mul.Tensor", x, 2.0)
    for i in range(layers):
        x = block(builder, x, f"layers.{i}", width)
    x = builder.call("aten.layer_norm.default", x, [width])
    head = torch.randn(classes or vocabulary, width, dtype=torch.float64)
    weight = table if tied else builder.param("head.weight", head)
    return builder.finish(builder.call("aten.linear.default", x, weight))


def tokens(vocabulary: int = 50) -> torch.Tensor:
    """An input of `language_model`."""
    return torch.arange(6).reshape(2, 3) * 7 % vocabulary
