"""One call of each kind, with all optional operands, which its kernels take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Operands = Sequence[Tensor | None]


class KindCall(NamedTuple):
    attrs: Mapping[str, Any]
    inputs: Operands
    outputs: Operands


_draws = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    """Numbers."""
    return torch.randn(shape, generator=_draws)


def last(*shape: int) -> Tensor:
    """Numbers with their channels last."""
    return f(*shape).to(memory_format=torch.channels_last)


def index(top: int, *shape: int) -> Tensor:
    return torch.randint(top, shape, generator=_draws)


X, CHANNELS, HEADS = (2, 6, 11), (3, 4, 5, 6), (2, 3, 5, 4)
ADAM = dict.fromkeys(("beta1", "beta2", "eps", "weight_decay"), 0.5) | {"amsgrad": 1, "maximize": 0}
POOL = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "mean": 0, "count_padding": 0}
CALLS: Mapping[str, KindCall] = {
    "copy": KindCall({}, [f(*X)], [f(*X)]),
    "fill": KindCall({"value": 3.0}, [], [f(*X)]),
    "concat": KindCall({"dim": 1}, [f(*X), f(2, 3, 11)], [f(2, 9, 11)]),
    "add": KindCall({"alpha": 0.5}, [f(*X), f(*X)], [f(*X)]),
    "bias_add": KindCall({}, [f(*X), f(11)], [f(*X)]),
    "relu": KindCall({}, [f(*X)], [f(*X)]),
    "relu_bwd": KindCall({"threshold": 0.1}, [f(*X), f(*X)], [f(*X)]),
    "chain": KindCall(
        {"program": "mul x0 x1; tanh %0; add %1 x0 -> %2 %0"}, [f(*X), f(*X)], [f(*X), f(*X)]
    ),
    "dropout": KindCall(
        {"p": 0.5, "seed": 1, "site": 2, "offsets": (0, 0, 0), "whole_shape": X},
        [f(*X), torch.tensor([3])],
        [f(*X)],
    ),
    "reduce_sum": KindCall({"dims": (0, 2), "scale": 0.5}, [f(*X)], [f(1, 6, 1)]),
    "gemm": KindCall({"activation": 1}, [f(2, 3, 4), f(4, 5), f(5), f(2, 3, 5)], [f(2, 3, 5)]),
    "bmm": KindCall({"alpha": 0.5}, [f(5, 2, 3), f(5, 3, 4)], [f(5, 2, 4)]),
    "softmax": KindCall({"dim": 2, "log": 0}, [f(*X)], [f(*X)]),
    "softmax_bwd": KindCall({"dim": 1, "log": 1}, [f(*X), f(*X)], [f(*X)]),
    "layer_norm": KindCall(
        {"dims": 1, "eps": 1e-5}, [f(*X), f(11), f(11)], [f(*X), f(2, 6, 1), f(2, 6, 1)]
    ),
    "layer_norm_bwd": KindCall(
        {"dims": 1},
        [f(*X), f(*X), f(2, 6, 1), f(2, 6, 1), f(11), f(11)],
        [f(*X), f(11), f(11)],
    ),
    "batch_norm": KindCall(
        {"training": 1, "momentum": 0.1, "eps": 1e-5},
        [f(*CHANNELS), f(4), f(4), f(4), f(4).abs()],
        [f(*CHANNELS), f(4), f(4), f(4), f(4)],
    ),
    "batch_norm_bwd": KindCall(
        {"training": 1, "eps": 1e-5},
        [f(*CHANNELS), f(*CHANNELS), f(4), f(4), f(4), f(4), f(4)],
        [f(*CHANNELS), f(4), f(4)],
    ),
    "attention": KindCall(
        {"causal": 0, "scale": 0.5},
        [f(*HEADS), f(*HEADS), f(*HEADS), f(5, 5)],
        [f(*HEADS), f(2, 3, 5)],
    ),
    "attention_bwd": KindCall(
        {"causal": 0, "scale": 0.5},
        [f(*HEADS), f(*HEADS), f(*HEADS), f(*HEADS), f(*HEADS), f(2, 3, 5) + 5, f(5, 5)],
        [f(*HEADS), f(*HEADS), f(*HEADS)],
    ),
    "embedding": KindCall({}, [f(7, 3), index(7, 2, 5)], [f(2, 5, 3)]),
    "embedding_bwd": KindCall({"padding": 2}, [f(2, 5, 3), index(7, 2, 5)], [f(7, 3)]),
    "cross_entropy": KindCall(
        {"reduction": 0, "ignore": 1},
        [f(4, 5), index(5, 4), f(5).abs()],
        [f(4), f(), f(4, 5)],
    ),
    "cross_entropy_bwd": KindCall(
        {"reduction": 1, "ignore": 1},
        [f(), f(4, 5), index(5, 4), f().abs() + 3, f(5).abs()],
        [f(4, 5)],
    ),
    "mse": KindCall({"reduction": 1}, [f(*X), f(*X)], [f()]),
    "mse_bwd": KindCall({"reduction": 1}, [f(), f(*X), f(*X)], [f(*X)]),
    "conv": KindCall(
        {"padding": (1, 1), "activation": 1},
        [last(2, 8, 5, 6), last(4, 8, 3, 3), f(4), last(2, 4, 5, 6)],
        [last(2, 4, 5, 6)],
    ),
    "pool": KindCall(POOL, [f(2, 3, 4, 6)], [f(2, 3, 2, 3)]),
    "sgd": KindCall({"momentum": 0.9}, [*(f(2, 3) for _ in range(3)), f()], [f(2, 3), f(2, 3)]),
    "adam": KindCall(ADAM, [*(f(2, 3).abs() for _ in range(5)), f(), f()], [f(2, 3)] * 4),
    "adamw": KindCall(ADAM, [*(f(2, 3).abs() for _ in range(5)), f(), f()], [f(2, 3)] * 4),
    "step_inc": KindCall({"by": 2.0}, [f()], [f()]),
}
