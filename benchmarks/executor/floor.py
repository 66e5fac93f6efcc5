"""The floor of a workload: its heavy operators alone, called on tensors that are there already.

A step of eager is watched below autograd, and what it calls of matrix products, convolutions,
attention and fused optimizers is called again, one after the other, into memory made ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
PRODUCTS = {
    ATEN.mm.default: partial(torch.mm),
    ATEN.addmm.default: partial(torch.addmm),
    ATEN.bmm.default: partial(torch.bmm),
    ATEN.baddbmm.default: partial(torch.baddbmm),
}
"""What has a form that writes to memory which is given."""
OTHERS = {
    ATEN.convolution.default,
    ATEN.convolution_backward.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ATEN._fused_adam_.default,
    ATEN._fused_adamw_.default,
}


class Watch(TorchDispatchMode):
    """Keeps the heavy calls that go by, as functions without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            out = torch.empty_like(result)
            plain = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
            self.calls.append(partial(PRODUCTS[func], *plain, out=out, **(kwargs or {})))
        elif func in OTHERS:
            self.calls.append(partial(func, *args, **(kwargs or {})))
        return result


def floor_of(
    call: Callable[..., Any], batch: tuple[Tensor, ...], *, training: bool
) -> Callable[[], Any]:
    """The heavy calls of one step or forward."""
    call(*batch)
    with torch.set_grad_enabled(training), Watch() as watch:
        call(*batch)

    def run() -> None:
        with torch.inference_mode():
            for function in watch.calls:
                function()

    return run
