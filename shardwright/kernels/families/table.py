"""The one table of torch kernels, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.kernels.families import contractions, elementwise, generic, layers, optimizers
from shardwright.kernels.families.kernel import Closure, Kernel, Tensors
from shardwright.kernels.kinds import BY_NAME

KERNELS: Mapping[str, Kernel] = {
    **generic.KERNELS,
    **elementwise.KERNELS,
    **contractions.KERNELS,
    **layers.KERNELS,
    **optimizers.KERNELS,
}
"""Every kind of `kinds.KINDS` has a row."""


def bind_torch(kind: str, attrs: Mapping[str, Any], ins: Tensors, outs: Tensors) -> Closure:
    """What a call of ``kind`` does, on these tensors; attributes left out have their defaults."""
    return KERNELS[kind]({**BY_NAME[kind].defaults, **attrs}, ins, outs)
