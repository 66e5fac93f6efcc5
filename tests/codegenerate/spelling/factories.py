"""Samples of operators that make tensors of nothing, and of those that draw random numbers."""

from __future__ import annotations

import torch

from shardwright.codegenerate.spelling.forms import words
from tests.codegenerate.spelling_samples import Sample as S
from tests.codegenerate.spelling_samples import X, f

FACTORIES = [
    S("arange.default", (5,), "torch.arange(5, device=self.place)", {"pin_memory": False}),
    S("arange.start", (1, 5), "torch.arange(1, 5, device=self.place)", {"pin_memory": False}),
    S(
        "arange.start_step",
        (0, 8, 2),
        "torch.arange(0, 8, 2, device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "arange.default",
        (5.0,),
        "torch.arange(5.0, dtype=torch.float32, device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "arange.start_step",
        (0, 8, 2),
        "torch.arange(0, 8, 2, dtype=torch.float32, device=self.place)",
        {"pin_memory": False, "dtype": torch.float32},
    ),
    *(
        S(
            f"{name}.default",
            ([2, 3],),
            f"torch.{name}(2, 3, dtype=torch.float32, device=self.place)",
            {"pin_memory": False},
        )
        for name in words("zeros ones rand randn")
    ),
    S(
        "full.default",
        ([2, 3], 0.5),
        "torch.full((2, 3), 0.5, dtype=torch.float32, device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "eye.default",
        (3,),
        "torch.eye(3, dtype=torch.float32, device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "eye.m",
        (3, 4),
        "torch.eye(3, 4, dtype=torch.float32, device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "linspace.default",
        (0, 1, 5),
        "torch.linspace(0, 1, 5, dtype=torch.float32, device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "randint.low",
        (0, 5, [3]),
        "torch.randint(0, 5, (3,), device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "randint.default",
        (5, [3]),
        "torch.randint(5, (3,), device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "randperm.default",
        (5,),
        "torch.randperm(5, device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "tril_indices.default",
        (3, 3),
        "torch.tril_indices(3, 3, device=self.place)",
        {"pin_memory": False},
    ),
    S(
        "triu_indices.default",
        (3, 3),
        "torch.triu_indices(3, 3, device=self.place)",
        {"pin_memory": False},
    ),
    S("zeros_like.default", (X,), "torch.zeros_like(a)", {"pin_memory": False}),
    S(
        "ones_like.default",
        (X,),
        "torch.ones_like(a, dtype=torch.bool)",
        {"pin_memory": False, "dtype": torch.bool},
    ),
    S("full_like.default", (X, 2.0), "torch.full_like(a, 2.0)", {"pin_memory": False}),
    S("empty_like.default", (X,), "torch.empty_like(a)", {"pin_memory": False}),
    S("rand_like.default", (X,), "torch.rand_like(a)", {"pin_memory": False}),
    S("randn_like.default", (X,), "torch.randn_like(a)", {"pin_memory": False}),
    S("new_zeros.default", (X, [2, 3]), "a.new_zeros(2, 3)", {"pin_memory": False}),
    S("new_ones.default", (X, [2]), "a.new_ones(2)", {"pin_memory": False}),
    S(
        "empty.memory_format",
        ([2, 3],),
        "torch.empty(2, 3, dtype=torch.float32, device=self.place)",
        {"pin_memory": False},
    ),
    S("new_empty.default", (X, [2]), "a.new_empty(2)", {"pin_memory": False}),
    S("new_full.default", (X, [2], 0.5), "a.new_full((2,), 0.5)", {"pin_memory": False}),
    S(
        "scalar_tensor.default",
        (0.5,),
        "torch.scalar_tensor(0.5, dtype=torch.float32, device=self.place)",
        {"pin_memory": False},
    ),
    S("bernoulli.default", (f(3),), "torch.bernoulli(a)"),
    S("bernoulli.p", (X, 0.5), "torch.bernoulli(a, 0.5)"),
    S("multinomial.default", (f(4), 2), "torch.multinomial(a, 2)"),
    S("poisson.default", (X,), "torch.poisson(a)"),
]
