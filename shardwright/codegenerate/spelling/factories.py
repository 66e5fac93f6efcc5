"""Rows of operators that make tensors of nothing, and of those that draw random numbers.

    arange(5, device=SLOT)         torch.arange(5, device=x.device)
    new_zeros(x, [2, 3])           x.new_zeros(2, 3)

A device is said where the call names one: that of an operand, or the caller's expression.
"""

from __future__ import annotations

import torch

from shardwright.codegenerate.expression import Expression
from shardwright.codegenerate.spelling.arguments import ALWAYS, Style
from shardwright.codegenerate.spelling.call import Call, Row
from shardwright.codegenerate.spelling.forms import function, method, words

FACTORIES = words("""
    full.default eye.default eye.m linspace.default randint.default randint.low
    randperm.default tril_indices.default triu_indices.default
    scalar_tensor.default
""")

OF_SIZES = words("zeros.default ones.default empty.memory_format rand.default randn.default")

LIKE = words("zeros_like ones_like full_like empty_like rand_like randn_like")

RANDOM = words("bernoulli.default bernoulli.p multinomial.default poisson.default")


def arange(call: Call) -> Expression | None:
    """``torch.arange(5)``; whole numbers are i64 without being told, a step of 1 is told."""
    ends = [call.arguments.get(name) for name in ("start", "end", "step")]
    whole = all(isinstance(end, int) for end in ends if end is not None)
    defaults = {"step": ALWAYS, **({"dtype": torch.int64} if whole else {})}
    return function("torch.arange", Style(defaults=defaults, front=3))(call)


ROWS: dict[str, Row] = {
    **{f"aten.{name}": function(f"torch.{name.partition('.')[0]}") for name in FACTORIES + RANDOM},
    **{
        f"aten.{name}": function(f"torch.{name.partition('.')[0]}", Style(spread="size"))
        for name in OF_SIZES
    },
    **{f"aten.{name}.default": function(f"torch.{name}") for name in LIKE},
    **{
        f"aten.{name}.default": method(name, Style(spread="size"))
        for name in words("new_zeros new_ones new_empty")
    },
    "aten.new_full.default": method("new_full"),
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
}
