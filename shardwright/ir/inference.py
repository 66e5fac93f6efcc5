"""What an operator makes, without computing it: shapes, dtypes and strides.

The operator runs on fake CPU tensors, which follow the kernels that the CPU chooses; strides on
the meta device do not (convolutions in channels-last, attention). A process keeps an answer for the
next call on tensors of the same kind, so a stack of equal layers costs what one of them costs, and
a plan, a file and a pass over a captured graph cost nothing.

Where fake kernels give other dtypes or strides than the CPU's kernels they are corrected: checks of
files and the memory of plans rely on that. A test runs each such operator both ways, with arguments
in every memory order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from shardwright.errors import GraphError
from shardwright.ir.operators import (
    flatten_results,
    is_built_in,
    join_call,
    operator_name,
    resolve,
)
from shardwright.ir.values import IRValue
from shardwright.torch_internals import (
    FakeTensorMode,
    OpOverload,
    checks_hold,
    is_fused_step,
    schema_of,
    without_fake_failures,
)

Answer = tuple[torch.Tensor | None, ...]

_MOST_KEPT = 16384
"""The calls of some dozen models."""
_keeping = threading.Lock()
_kept: dict[object, Answer] = {}
"""The last answers in this process, by device, settings of torch and call, the oldest first.

Users' own operators are left out: they can be registered anew with another fake kernel.
"""


class Inference:
    """Answers for one graph under construction."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._mode: FakeTensorMode | None = None
        self._of_users: dict[object, Answer] = {}

    def outputs(self, op: str, inputs: Sequence[IRValue], attrs: Mapping[str, Any]) -> Answer:
        """Meta tensors like those that ``op`` makes, None where it returns no tensor.

        Raises GraphError where it cannot be told.
        """
        known = _kept if is_built_in(op) else self._of_users
        metas = tuple(value.meta for value in inputs)
        key = (self._device, settings(), op, metas, repr(attrs))
        found = known.get(key)
        if found is None:
            found = self._run(op, inputs, attrs)
            with _keeping:  # Another thread's answer must not come while the oldest is looked up.
                known[key] = found
                while len(known) > _MOST_KEPT:
                    del known[next(iter(known))]
        return found

    def _run(self, op: str, inputs: Sequence[IRValue], attrs: Mapping[str, Any]) -> Answer:
        overload = resolve(op)
        self._mode = self._mode or FakeTensorMode(allow_fallback_kernels=False)
        try:
            with _as_kernels_are_called(), self._mode, checks_hold(overload):
                tensors = [value.meta.empty(self._device) for value in inputs]
                args, kwargs = join_call(overload, tensors, dict(attrs), self._device)
                _check_updated(overload, args)
                result = _updated(overload, args) or overload(*args, **kwargs)
        except GraphError:
            raise
        except Exception as error:
            raise GraphError(f"{_call(op, inputs, attrs)} does not run: {error}") from error
        made = flatten_results(result)
        if made and not any(isinstance(item, torch.Tensor) for item in made):
            raise GraphError(
                f"{_call(op, inputs, attrs)} returns {made[0]!r}; a graph holds operators that "
                "return tensors"
            )
        try:
            corrected = as_kernels_make(overload, made, args)
        except RuntimeError as error:  # of arguments that only the kernel looks at
            raise GraphError(f"{_call(op, inputs, attrs)} does not run: {error}") from error
        return tuple(
            _on_meta(item) if isinstance(item, torch.Tensor) else None for item in corrected
        )


def settings() -> tuple[object, ...]:
    """What, beside a call, torch chooses kernels by: above all those of attention."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _updated(overload: OpOverload, args: Sequence[Any]) -> list[torch.Tensor]:
    """What a fused optimizer makes: tensors like those of the lists that it updates.

    It has no fake kernel, and torch would run the real one, on as much memory as it takes.
    """
    if not is_fused_step(overload):
        return []
    schema = schema_of(overload)
    given = {argument.name: item for argument, item in zip(schema.arguments, args, strict=False)}
    lists = (given[str(result.name).removesuffix("_out")] for result in schema.returns)
    return [torch.empty_like(tensor) for tensors in lists for tensor in tensors]


def _check_updated(overload: OpOverload, args: Sequence[Any]) -> None:
    """Raise GraphError where the lists of a fused optimizer do not go together.

    Its kernels believe it: they take as many elements of each list's tensor as the first list's
    has.
    """
    if not is_fused_step(overload):
        return
    op = operator_name(overload)
    lists = [item for item in args if isinstance(item, list)]
    for tensors in filter(None, lists):
        alike = len(tensors) == len(lists[0]) and all(
            (item.shape, item.dtype) == (first.shape, first.dtype) or item.numel() == 1
            for item, first in zip(tensors, lists[0], strict=True)
        )
        steps = tensors is lists[-1] and all(item.numel() == 1 for item in tensors)
        sizes = [item.shape for item in tensors]
        if not alike or (not steps and sizes != [first.shape for first in lists[0]]):
            raise GraphError(
                f"{op} takes lists of tensors of {[list(s) for s in sizes]}, of parameters of "
                f"{[list(first.shape) for first in lists[0]]}; they must be the same in each list"
            )
        if any(_reach(item) < item.numel() for item in tensors):
            raise GraphError(f"{op} takes tensors whose elements overlap; give each its own memory")


def _reach(tensor: torch.Tensor) -> int:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 0 if not tensor.numel() else 1 + sum((size - 1) * step for size, step in pairs)


@contextmanager
def _as_kernels_are_called() -> Iterator[None]:
    """No gradients, no autocast, and no word but the error where a call is wrong."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), without_fake_failures():
        yield


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _call(op: str, inputs: Sequence[IRValue], attrs: Mapping[str, Any]) -> str:
    """The call in a message: ``aten.add.Tensor(%x f32[2, 3], %y f32[4], alpha=1)``."""
    tensors = [f"%{value.name} {value.dtype}{list(value.shape)}" for value in inputs]
    return f"{op}({', '.join(tensors + [f'{key}={value!r}' for key, value in attrs.items()])})"


# --- results as kernels make them -----------------------------------------------------------------

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

    def corrected(results: _Results, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        first, *others = _all_contiguous(results, args)
        if first is not None:
            first = first.to(memory_format=memory_format_of(args[number]))
        return first, *others

    return corrected


def _element_by_element(*numbers: int) -> _Correct:
    """In the order of a product of these arguments, or of one with a number: the first leads."""

    def corrected(results: _Results, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        first, *others = (args[number] for number in numbers)
        like = torch.ops.aten.mul.Tensor(first, *others) if others else torch.empty_like(first)
        return tuple(r if r is None else torch.empty_like(like, dtype=r.dtype) for r in results)

    return corrected


def _summed_in_double(
    results: Sequence[torch.Tensor], args: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """In torch 2.9 fake sums of exponentials are f32 also where the attention is f64."""
    out, sums = results
    return out, sums.to(torch.promote_types(out.dtype, torch.float32))


_CORRECTIONS = {
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
    _as_argument(0): (
        "aten.group_norm.default",
        "aten.native_batch_norm.default",
        "aten.native_group_norm.default",
    ),
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
"""Corrections of results, and of which operators."""


@cache
def _kernels_make() -> dict[OpOverload, _Correct]:
    return {resolve(op): correct for correct, ops in _CORRECTIONS.items() for op in ops}
