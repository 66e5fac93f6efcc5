"""One call of each kind, with all optional operands, which its kernels take."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

Operands = Sequence[torch.Tensor | None]


class Call(NamedTuple):
    attrs: Mapping[str, Any]
    inputs: Operands
    outputs: Operands


def floats(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def images(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape).to(memory_format=torch.channels_last) for shape in shapes]


def numbers(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.int64)]


LINE, ROW, HEADS = (2, 3), (3,), (1, 2, 3, 4)
ADAM = dict.fromkeys(("beta1", "beta2", "eps", "weight_decay"), 0.5) | {"amsgrad": 1, "maximize": 0}
CALLS: Mapping[str, Call] = {
    "copy": Call({}, floats(LINE), floats(LINE)),
    "fill": Call({"value": 1.0}, [], floats(LINE)),
    "concat": Call({"dim": 0}, floats(LINE, (1, 3)), floats((3, 3))),
    "add": Call({}, floats(LINE, LINE), floats(LINE)),
    "bias_add": Call({}, floats(LINE, ROW), floats(LINE)),
    "relu": Call({}, floats(LINE), floats(LINE)),
    "relu_bwd": Call({}, floats(LINE, LINE), floats(LINE)),
    "chain": Call({"program": "add x0 x1 -> %0"}, floats(LINE, LINE), floats(LINE)),
    "dropout": Call(
        {"p": 0.5, "seed": 0, "site": 0, "offsets": (0, 0), "whole_shape": LINE},
        [*floats(LINE), *numbers(1)],
        floats(LINE),
    ),
    "reduce_sum": Call({"dims": (1,), "scale": 1.0}, floats(LINE), floats((2,))),
    "gemm": Call({}, floats(LINE, (3, 4), (4,), (2, 4)), floats((2, 4))),
    "bmm": Call({}, floats((5, 2, 3), (5, 3, 4)), floats((5, 2, 4))),
    "softmax": Call({"dim": 1, "log": 0}, floats(LINE), floats(LINE)),
    "softmax_bwd": Call({"dim": 1, "log": 0}, floats(LINE, LINE), floats(LINE)),
    "layer_norm": Call(
        {"dims": 1, "eps": 1e-5}, floats(LINE, ROW, ROW), floats(LINE, (2, 1), (2, 1))
    ),
    "layer_norm_bwd": Call(
        {}, floats(LINE, LINE, (2, 1), (2, 1), ROW, ROW), floats(LINE, ROW, ROW)
    ),
    "batch_norm": Call(
        {"training": 1, "momentum": 0.1, "eps": 1e-5},
        floats(LINE, ROW, ROW, ROW, ROW),
        floats(LINE, ROW, ROW, ROW, ROW),
    ),
    "batch_norm_bwd": Call(
        {"training": 1, "eps": 1e-5},
        floats(LINE, LINE, ROW, ROW, ROW, ROW, ROW),
        floats(LINE, ROW, ROW),
    ),
    "attention": Call(
        {"causal": 0, "scale": 1.0}, floats(HEADS, HEADS, HEADS, (3, 3)), floats(HEADS, (1, 2, 3))
    ),
    "attention_bwd": Call(
        {"causal": 0, "scale": 1.0},
        floats(HEADS, HEADS, HEADS, HEADS, HEADS, (1, 2, 3), (3, 3)),
        floats(HEADS, HEADS, HEADS),
    ),
    "embedding": Call({}, [*floats((5, 3)), *numbers(2)], floats(LINE)),
    "embedding_bwd": Call({}, [*floats(LINE), *numbers(2)], floats((5, 3))),
    "cross_entropy": Call({}, [*floats(LINE), *numbers(2), *floats(ROW)], floats((), (), LINE)),
    "cross_entropy_bwd": Call({}, [*floats((), LINE), *numbers(2), *floats((), ROW)], floats(LINE)),
    "mse": Call({}, floats(LINE, LINE), floats(())),
    "mse_bwd": Call({}, floats((), LINE, LINE), floats(LINE)),
    "conv": Call(
        {},
        images((1, 8, 5, 5), (4, 8, 3, 3)) + floats((4,)) + images((1, 4, 3, 3)),
        images((1, 4, 3, 3)),
    ),
    "pool": Call(
        {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "mean": 0, "count_padding": 0},
        floats((1, 3, 4, 4)),
        floats((1, 3, 2, 2)),
    ),
    "sgd": Call({"momentum": 0.9}, floats(LINE, LINE, LINE, ()), floats(LINE, LINE)),
    "adam": Call(ADAM, floats(*[LINE] * 5, (), ()), floats(*[LINE] * 4)),
    "adamw": Call(ADAM, floats(*[LINE] * 5, (), ()), floats(*[LINE] * 4)),
    "step_inc": Call({}, floats(()), floats(())),
}
