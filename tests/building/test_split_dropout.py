"""Dropout under every way to split: the same elements are dropped as on one device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.tracing.dropout import philox_dropout


class Block(nn.Module):
    """A transformer's layer that drops attention weights, hidden and residual elements."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm(x))))))


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(32, 4), Block(32, 4)).double(), torch.randn(6, 8, 32).double()
    graph = philox_dropout(sw.capture(model, (x,)), seed=3)
    return graph, x, graph.run(x, rng=torch.tensor([9]))


@pytest.mark.parametrize(
    "how",
    [
        {"devices": 2, "policy": "pipeline"},
        {"devices": 2, "policy": "tensor"},
        {"devices": 3, "policy": "tensor"},
        {"devices": 3, "policy": "data"},
        {"devices": 2, "policy": "sequence"},
        {"mesh": {"data": 2, "tensor": 2}},
    ],
    ids=lambda how: ",".join(map(str, how.values())),
)
def test_a_split_run_drops_what_a_whole_one_does(case, how) -> None:
    graph, x, expected = case
    plan = sw.plan(graph, **how)
    assert plan.notes == ()
    pipeline = sw.build(graph, plan)
    made = sw.run(pipeline, x, rng=torch.tensor([9]), in_process=True)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(made == 0, expected == 0)


@pytest.mark.workers
def test_every_worker_has_the_operator(case) -> None:
    graph, x, expected = case
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    assert pipeline.requires is None
    assert torch.equal(sw.run(pipeline, x, rng=torch.tensor([9])), expected)
