"""Attention written out against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from shardwright.ir import Builder, IRValue, resolve
from shardwright.ir.operators import operator_name, split_call
from shardwright.tracing.dropout import write_attention
from shardwright.tracing.emitter import GraphEmitter

SDPA = resolve("aten.scaled_dot_product_attention.default")
BOOLS = torch.rand(5, 7) > 0.3
BOOLS[2] = False  # a row without keys


def written(query, key, value, mask=None, **options):
    """What the nodes of a call give, without dropout."""
    builder = Builder("attention")
    tensors = [item for item in (query, key, value, mask) if item is not None]
    dtypes = {torch.float64: "f64", torch.bool: "bool"}
    values = [builder.input(f"x{i}", t.shape, dtypes[t.dtype]) for i, t in enumerate(tensors)]
    inputs, attrs = split_call(
        SDPA, values, options, is_tensor=lambda item: isinstance(item, IRValue)
    )
    made = write_attention(GraphEmitter(builder), inputs, attrs, lambda weights: weights)
    graph = builder.finish(made)
    assert operator_name(SDPA) not in {node.op for node in graph.nodes}
    return graph.run(*tensors)


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {}),
        (None, {"is_causal": True}),
        (None, {"scale": 0.3}),
        (BOOLS, {}),
        (BOOLS[:, :1], {}),
        (torch.randn(3, 1, 5, 7, dtype=torch.float64), {}),
        (torch.zeros(5, 7, dtype=torch.float64).masked_fill(~BOOLS, -torch.inf), {}),
    ],
)
def test_it_computes_what_torch_does(mask, options) -> None:
    q, k, v = heads(3, 2, 5, 8), heads(3, 2, 7, 8), heads(3, 2, 7, 6)
    expected = F.scaled_dot_product_attention(q, k, v, mask, **options)
    torch.testing.assert_close(written(q, k, v, mask, **options), expected)


def test_heads_may_share_keys() -> None:
    q, k, v = heads(3, 6, 5, 8), heads(3, 2, 7, 8), heads(3, 2, 7, 8)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(written(q, k, v, enable_gqa=True), expected)


def test_without_batch_and_heads() -> None:
    q, k, v = heads(5, 8), heads(7, 8), heads(7, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(written(q, k, v, is_causal=True), expected)
