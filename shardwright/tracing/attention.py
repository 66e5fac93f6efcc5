"""Attention with dropout, written out: products, softmax, dropout, product.

Comes in: a call of ``aten.scaled_dot_product_attention`` and what drops elements of a value. Goes
out: nodes that compute the same, in the order of torch's own definition of the operator. What
always holds: a row whose keys are all masked is zero, as torch has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.ir.values import IRValue
from shardwright.tracing.emitter import Emitter


def write_attention(
    e: Emitter,
    inputs: Sequence[IRValue],
    attrs: dict[str, Any],
    dropped: Callable[[IRValue], IRValue],
) -> IRValue:
    """The nodes of one call; ``dropped`` writes the dropout of the weights that it is given."""
    query, key, value, *mask = inputs
    if attrs["enable_gqa"]:
        key, value = (_repeated(e, item, query.shape[-3]) for item in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if attrs["scale"] is None else attrs["scale"]
    scaled = e.one("aten.mul.Tensor", query, scale)
    scores = e.one("aten.matmul.default", scaled, e.one("aten.transpose.int", key, -2, -1))
    if attrs["is_causal"]:
        scores = _masked(e, scores, _later_keys(e, scores))
    softmax = "aten.softmax.int"
    if mask:
        scores = _with_mask(e, scores, mask[0])
        softmax = "aten._safe_softmax.default"
    return e.one("aten.matmul.default", dropped(e.one(softmax, scores, -1)), value)


def _repeated(e: Emitter, value: IRValue, heads: int) -> IRValue:
    """Each head several times in a row, so that there are ``heads``."""
    times = heads // value.shape[-3]
    if times == 1:
        return value
    return e.one("aten.repeat_interleave.self_int", value, times, -3)


def _later_keys(e: Emitter, scores: IRValue) -> IRValue:
    """Whether a key stands behind its query."""
    every = e.one("aten.ones.default", list(scores.shape[-2:]), dtype=torch.bool)
    return e.one("aten.triu.default", every, 1)


def _with_mask(e: Emitter, scores: IRValue, mask: IRValue) -> IRValue:
    """Bools say which keys count; numbers are added."""
    if mask.dtype == "bool":
        return _masked(e, scores, e.one("aten.logical_not.default", mask))
    return e.one("aten.add.Tensor", scores, mask)


def _masked(e: Emitter, scores: IRValue, away: IRValue) -> IRValue:
    return e.one("aten.masked_fill.Scalar", scores, away, -math.inf)
