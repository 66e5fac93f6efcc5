"""Corrections of fake kernels whose dtypes or strides differ from those of the CPU's kernels.

The checks of files and the memory of plans rely on the corrected results. A test runs each operator
both ways, with arguments in every memory order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from shardwright.ir.operators import resolve
from shardwright.torch_internals import OpOverload

_Results = Sequence[torch.Tensor | None]
_Correct = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]


def as_kernels_make(
    overload: OpOverload, results: Sequence[Any], args: Sequence[Any]
) -> tuple[Any, ...]:
    """Fake results as the CPU's kernels make them, where the fake kernels say otherwise.

    ``args`` are the arguments of the call by place.
    """
    correct = _kernels_make().get(overload)
    return tuple(results) if correct is None else correct(results, args)


def _all_contiguous(results: _Results, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
    """Where an input is not, fake results take over its strides."""
    return tuple(r if r is None else r.new_empty(r.shape) for r in results)


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Channels last where a tensor is so and not contiguous as well, else contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    is_last = last is not None and tensor.is_contiguous(memory_format=last)
    return last if last and is_last and not tensor.is_contiguous() else torch.contiguous_format


def _as_argument(number: int) -> _Correct:
    """In the memory format of an argument: channels last or contiguous, nothing between."""

    def laid_out(results: _Results, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        first, *others = _all_contiguous(results, args)
        if first is not None:
            first = first.to(memory_format=memory_format_of(args[number]))
        return first, *others

    return laid_out


def _element_by_element(*numbers: int) -> _Correct:
    """As a product of these arguments, or of one with a number, lies: the first counts most."""

    def laid_out(results: _Results, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        first, *others = (args[number] for number in numbers)
        like = torch.ops.aten.mul.Tensor(first, *others) if others else torch.empty_like(first)
        return tuple(r if r is None else torch.empty_like(like, dtype=r.dtype) for r in results)

    return laid_out


def _summed_in_double(
    results: Sequence[torch.Tensor], args: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """In torch 2.9 fake sums of exponentials are f32 also where the attention is f64."""
    out, sums = results
    return out, sums.to(torch.promote_types(out.dtype, torch.float32))


_LIE_AS = {
    _element_by_element(0): ("aten.log_sigmoid_backward.default",),
    _element_by_element(0, 5): ("aten.elu_backward.default",),
    _element_by_element(0, 1): (
        "aten.hardsigmoid_backward.default",
        "aten.hardswish_backward.default",
        "aten.hardtanh_backward.default",
        "aten.logit_backward.default",
        "aten.native_dropout_backward.default",
        "aten.softplus_backward.default",
        "aten.xlogy.Tensor",
    ),
    _element_by_element(1, 0): (
        "aten._prelu_kernel_backward.default",
        "aten.leaky_relu_backward.default",
        "aten.threshold_backward.default",
    ),
    _element_by_element(2, 0): ("aten.rrelu_with_noise_backward.default",),
    _as_argument(0): ("aten.native_batch_norm.default",),
    _as_argument(1): (
        "aten.native_batch_norm_backward.default",
        "aten.native_group_norm_backward.default",
        "aten.reflection_pad2d_backward.default",
        "aten.reflection_pad3d_backward.default",
        "aten.replication_pad2d_backward.default",
        "aten.replication_pad3d_backward.default",
    ),
    _all_contiguous: (
        "aten._log_softmax_backward_data.default",
        "aten._softmax_backward_data.default",
        "aten.glu_backward.default",
        "aten.huber_loss_backward.default",
        "aten.log_sigmoid_forward.default",
        "aten.mse_loss_backward.default",
        "aten.native_layer_norm_backward.default",
        "aten.pow.Scalar",
        "aten.smooth_l1_loss_backward.default",
    ),
    _summed_in_double: ("aten._scaled_dot_product_flash_attention_for_cpu.default",),
}
"""How results lie, and of which operators."""


@cache
def _kernels_make() -> dict[OpOverload, _Correct]:
    return {resolve(op): correct for correct, ops in _LIE_AS.items() for op in ops}
