"""The one table of kernel kinds: what a lowered call may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.errors import ExecError
from shardwright.kernels import (
    attention,
    convolution,
    generic,
    losses,
    matmul,
    memory,
    normalization,
    optimizer,
    pointwise,
)
from shardwright.kernels.node_call import Emitter
from shardwright.kernels.row import Closure, KernelRow, Tensors

KINDS: tuple[KernelRow, ...] = (
    *generic.ROWS,
    *memory.ROWS,
    *pointwise.ROWS,
    *matmul.ROWS,
    *normalization.ROWS,
    *attention.ROWS,
    *losses.ROWS,
    *convolution.ROWS,
    *optimizer.ROWS,
)
BY_ID: Mapping[int, KernelRow] = {kind.id: kind for kind in KINDS}
BY_NAME: Mapping[str, KernelRow] = {kind.name: kind for kind in KINDS}
EMITTERS: Mapping[str, Emitter] = {
    op: emit for kind in KINDS for op, emit in kind.from_aten.items()
}
"""By the operator's full name."""


def kind_of(kind_id: int) -> KernelRow:
    """The row of an id. Raises ExecError."""
    try:
        return BY_ID[kind_id]
    except KeyError:
        raise ExecError(f"kind {kind_id} is unknown; this version has {sorted(BY_ID)}") from None


def bind_torch(kind: str, attrs: Mapping[str, Any], ins: Tensors, outs: Tensors) -> Closure:
    """What a call of ``kind`` does, on these tensors; attributes left out have their defaults."""
    row = BY_NAME[kind]
    return row.torch({**row.defaults, **attrs}, ins, outs)
