"""Operators for tests of what can go wrong: imported by workers through ``modules=``."""

from __future__ import annotations

import re
import time

import torch
from torch import Tensor

from shardwright.ir.operators import allow_namespace

allow_namespace("runtime_tests")


@torch.library.custom_op("runtime_tests::refuse_nan", mutates_args=())
def refuse_nan(x: Tensor) -> Tensor:
    """x, unless it holds a NaN."""
    if x.isnan().any():
        raise ArithmeticError("there is a NaN")
    return x.clone()


@refuse_nan.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("runtime_tests::nap", mutates_args=())
def nap(x: Tensor) -> Tensor:
    """x, after as many seconds as its first element says, if that is positive."""
    time.sleep(max(0.0, float(x.flatten()[0])))
    return x.clone()


@nap.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("runtime_tests::threads", mutates_args=())
def threads(x: Tensor) -> Tensor:
    """The least number of threads that torch, OpenMP or MKL would compute with, in x's shape."""
    said = torch.__config__.parallel_info()
    counts = [int(found) for found in re.findall(r"_max_threads\(\) : (\d+)", said)]
    return torch.full_like(x, min([torch.get_num_threads(), *counts]))


@threads.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
