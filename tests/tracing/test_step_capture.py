"""Steps of training as graphs: text out, without memory and in little time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir import IRGraph
from shardwright.ir.graph import forward_nodes, is_step
from shardwright.tracing import capture_step, compile_ir

PLAIN = """\
graph train_step
input %x: f32[2, 3]
input %lr: f64[]
param %weight: f32[1, 3] = "weight"
state %optimizer.weight.exp_avg: f32[1, 3] = "optimizer.weight.exp_avg" zeros
state %optimizer.weight.exp_avg_sq: f32[1, 3] = "optimizer.weight.exp_avg_sq" zeros
state %optimizer.weight.step: f32[] = "optimizer.weight.step" zeros
  zero_grad(parameters=["weight"], set_to_none=True)
  %linear: f32[2, 1] = aten.linear.default(%x, %weight, bias=None)
  %mean!: f32[] = aten.mean.default(%linear, dtype=None)
  %grad.weight: f32[1, 3] = Backward(%mean, parameters=["weight"], accumulate=False)
  %new.weight: f32[1, 3], %new.optimizer.weight.exp_avg: f32[1, 3], \
%new.optimizer.weight.exp_avg_sq: f32[1, 3], %new.optimizer.weight.step: f32[] = \
adamw_step(%lr, %weight, %grad.weight, %optimizer.weight.exp_avg, %optimizer.weight.exp_avg_sq, \
%optimizer.weight.step, parameters=["weight"], betas=[0.9, 0.999], eps=1e-08, weight_decay=0.01, \
amsgrad=False, maximize=False)
return %mean
update %weight = %new.weight
update %optimizer.weight.exp_avg = %new.optimizer.weight.exp_avg
update %optimizer.weight.exp_avg_sq = %new.optimizer.weight.exp_avg_sq
update %optimizer.weight.step = %new.optimizer.weight.step
"""

ACCUMULATED = """\
graph train_step
input %x: f32[2, 3]
input %lr: f64[]
param %weight: f32[1, 3] = "weight"
state %optimizer.weight.momentum_buffer: f32[1, 3] = "optimizer.weight.momentum_buffer" zeros
  %linear: f32[2, 1] = aten.linear.default(%x, %weight, bias=None)
  %sum_1: f32[] = aten.sum.default(%linear, dtype=None)
  %grad.weight: f32[1, 3] = Backward(%sum_1, parameters=["weight"], accumulate=False)
  %linear_1: f32[2, 1] = aten.linear.default(%x, %weight, bias=None)
  %ones_like: f32[2, 1] = aten.ones_like.default(%linear_1, dtype=None, layout=None, device=None, \
pin_memory=False, memory_format=None)
  %grad.weight__1: f32[1, 3] = Backward(%linear_1, %ones_like, parameters=["weight"], \
accumulate=True)
  %add: f32[1, 3] = aten.add.Tensor(%grad.weight, %grad.weight__1, alpha=1)
  %grad.weight__2: f32[1, 3] = clip_grad_value(%add, clip_value=0.5)
  %new.weight: f32[1, 3], %new.optimizer.weight.momentum_buffer: f32[1, 3] = \
sgd_step(%lr, %weight, %grad.weight__2, %optimizer.weight.momentum_buffer, parameters=["weight"], \
momentum=0.9, dampening=0, weight_decay=0, nesterov=False, maximize=False)
  zero_grad(parameters=["weight"], set_to_none=False)
return
update %weight = %new.weight
update %optimizer.weight.momentum_buffer = %new.optimizer.weight.momentum_buffer
"""


def text(graph: IRGraph) -> str:
    """The graph's text without lines of the program, modules and structures."""
    left_out = ("in ", "arguments ", "result ")
    lines = [line.partition("  # ")[0] for line in str(graph).splitlines()]
    return "\n".join(line for line in lines if not line.startswith(left_out)) + "\n"


def test_a_plain_step() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = compile_ir(step, torch.ones(2, 3))
    assert text(graph) == PLAIN


def test_gradients_that_add_up() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        result = model(x)
        result.backward(torch.ones_like(result))
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        model.zero_grad(set_to_none=False)

    model.weight.grad = torch.zeros_like(model.weight)
    warm = compile_ir(step, torch.ones(2, 3))
    assert "grad.weight" in {value.names[0] for value in warm.stored()}
    model.weight.grad = None

    def cleared(x: torch.Tensor) -> None:
        model.weight.grad = None
        step(x)

    assert text(compile_ir(cleared, torch.ones(2, 3))) == ACCUMULATED


def test_nodes_know_their_modules_and_lines() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Tanh()))

    def step(x: torch.Tensor) -> None:
        loss = model(x).mean()
        loss.backward()

    graph = compile_ir(step, torch.ones(2, 3))
    first = step.__code__.co_firstlineno
    assert [node.scope for node in graph.nodes[:3]] == ["0", "1.0", ""]
    lines = [node.source.line - first for node in graph.nodes[:4] if node.source]
    assert lines == [1, 1, 1, 2]


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


def gpt_step(layers: int, width: int, dropout: float = 0.0) -> tuple[nn.Module, Callable[..., Any]]:
    """A GPT without weights and its step."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(64, width),
            *(Block(width, dropout) for _ in range(layers)),
            nn.Linear(width, 64, bias=False),
        )
        model[-1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return model, step


def test_a_model_without_memory() -> None:
    model, step = gpt_step(layers=2, width=1 << 16)  # 1.6e11 parameters
    captured = capture_step(step, (torch.zeros(2, 8, dtype=torch.int64),))
    graph = captured.graph
    assert all(parameter.is_meta for parameter in model.parameters())
    assert graph.values[graph.inputs[-1]].name == "lr"
    assert captured.parameters.keys() == dict(model.named_parameters()).keys()
    assert [rate.value for rate in captured.rates] == [1e-3]
    tied = next(value for value in graph.stored() if value.names[0] == "0.weight")
    assert tied.names == ("0.weight", "3.weight")


def test_dropout_counts_with_an_input() -> None:
    _, step = gpt_step(layers=1, width=8, dropout=0.1)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    graph = compile_ir(step, tokens, seed=7)
    assert [graph.values[value_id].name for value_id in graph.inputs] == ["tokens", "lr", "rng"]
    (dropout,) = (node for node in graph.nodes if node.op == "shardwright.dropout.default")
    assert dropout.attrs["seed"] == 7
    assert is_step(graph)
    assert dropout in forward_nodes(graph)
