"""Autocast as casts: what torch.autocast does to the arguments of an operator, as nodes.

Nothing is known of operators here: a call is run three times on fake tensors, while the operators
that reach the kernels are noted:

    plain       without autocast, where it can be so: some take no mixed dtypes
    autocast    with it: which inputs are cast, and to what?
    cast        without it, on inputs cast so: are the operators the same, on the same dtypes?

Where "cast" is the same as "autocast", writing the casts is the same program; where it is not, and
the operator has no autocast rule of its own (it is a composite that casts something inside), it is
a CaptureError. Answers are kept by operator and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import CaptureError
from shardwright.ir.operators import join_call, operator_name
from shardwright.ir.values import IRValue
from shardwright.torch_internals import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    has_kernel_for,
    is_composite,
    storage_key,
    tree_leaves,
)
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.memory import TensorView

Dtypes = tuple[torch.dtype | None, ...]
"""For each tensor input the dtype it is cast to."""

_known: dict[tuple[object, ...], Dtypes] = {}
_TO_COPY = torch.ops.aten._to_copy.default
# With views, what gives the same whether it comes before or after a cast.
_MOVES = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)


class Casts:
    """The casts made in the autocast region at hand; `leave` forgets them.

    A gradient is rounded where autocast rounds it. Autocast shares the casts of parameters and
    inputs within a region, so that their gradients are added up before the cast's backward, and no
    others; so do we.
    """

    def __init__(self, emitter: GraphEmitter) -> None:
        self._emitter = emitter
        self._made: dict[tuple[int, torch.dtype, bool], IRValue] = {}

    def leave(self) -> None:
        """No autocast is in force any more."""
        self._made.clear()

    def of(
        self,
        overload: OpOverload,
        tensors: Sequence[TensorView],
        values: list[IRValue],
        attrs: dict[str, Any],
        autocast: Sequence[tuple[str, torch.dtype]],
    ) -> list[IRValue]:
        """``values`` as autocast hands them to ``overload``. Raises CaptureError."""
        specs = [tensor.spec for tensor in tensors]
        for device_type, dtype in autocast:
            if any(spec.device.type == device_type for spec in specs):
                casts = autocast_casts(overload, specs, attrs, device_type, dtype)
                own_rule = has_autocast_rule(overload, device_type)
                values = [
                    value if cast is None else self._cast(value, cast, own_rule and tensor.is_leaf)
                    for tensor, value, cast in zip(tensors, values, casts, strict=True)
                ]
        return values

    def _cast(self, value: IRValue, dtype: torch.dtype, shared: bool) -> IRValue:
        """A cast, made once where it is ``shared`` or where no gradient flows through it."""
        if self._emitter.is_differentiable(value) and not shared:
            return self._emitter.cast(value, dtype)
        key = (value.id, dtype, self._emitter.records)
        if key not in self._made:
            self._made[key] = self._emitter.cast(value, dtype)
        return self._made[key]


def autocast_casts(
    overload: OpOverload,
    inputs: Sequence[torch.Tensor],
    attrs: dict[str, Any],
    device_type: str,
    dtype: torch.dtype,
) -> Dtypes:
    """What autocast to ``dtype`` on ``device_type`` does to the inputs of a call.

    ``inputs`` are tensors of the call's shapes and dtypes; their contents are not looked at.
    Raises CaptureError.
    """
    composite = is_composite(overload)
    if not composite and not has_autocast_rule(overload, device_type):
        return (None,) * len(inputs)
    key: tuple[object, ...] = (overload, device_type, dtype, *(tensor.dtype for tensor in inputs))
    if composite:
        key += (*(tensor.shape for tensor in inputs), repr(attrs))
    if key not in _known:
        _known[key] = _discover(overload, inputs, attrs, device_type, dtype)
    return _known[key]


def _discover(
    overload: OpOverload,
    inputs: Sequence[torch.Tensor],
    attrs: dict[str, Any],
    device_type: str,
    dtype: torch.dtype,
) -> Dtypes:
    nothing: Dtypes = (None,) * len(inputs)
    under = _run(overload, inputs, attrs, device_type, dtype)
    try:
        plain = _run(overload, inputs, attrs, device_type, None)
    except RuntimeError:  # it takes no mixed dtypes, which autocast makes one
        plain = None
    if plain == under:
        return nothing
    casts = tuple(under.casts.get(index) for index in range(len(inputs)))
    dtypes = [cast or tensor.dtype for cast, tensor in zip(casts, inputs, strict=True)]
    cast = _run(overload, inputs, attrs, device_type, None, dtypes)
    own_rule = has_autocast_rule(overload, device_type) and cast.results == under.results
    if cast.operators != under.operators and not own_rule:
        raise CaptureError(
            f"under torch.autocast {operator_name(overload)} casts tensors inside it, which a "
            "graph cannot say; disable autocast around it (torch.autocast(..., enabled=False))"
        )
    return casts


def has_autocast_rule(overload: OpOverload, device_type: str) -> bool:
    """Whether autocast treats this operator itself, rather than operators it is made of."""
    return has_kernel_for(overload, f"Autocast{device_type.upper()}")


class _CastRecorder(TorchDispatchMode):
    """Notes the operators that reach kernels with the dtypes they see, and casts of inputs."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[tuple[Any, ...]] = []
        self.casts: dict[int, torch.dtype] = {}
        self.results: tuple[torch.dtype, ...] = ()
        self._inputs = {storage_key(tensor): index for index, tensor in enumerate(inputs)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _TO_COPY:
            index = self._inputs.get(storage_key(args[0]))
            if index is not None and kwargs.get("dtype") is not None:
                self.casts.setdefault(index, kwargs["dtype"])
        elif func.namespace != "prim" and not func.is_view and func not in _MOVES:
            self.operators.append((func, *_dtypes((args, kwargs))))
        return func(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CastRecorder) and (
            (self.operators, self.casts, self.results)
            == (other.operators, other.casts, other.results)
        )

    __hash__ = None  # type: ignore[assignment]


def _run(
    overload: OpOverload,
    inputs: Sequence[torch.Tensor],
    attrs: dict[str, Any],
    device_type: str,
    dtype: torch.dtype | None,
    input_dtypes: Sequence[torch.dtype] | None = None,
) -> _CastRecorder:
    """Run the call on fake tensors, under autocast where ``dtype`` is given."""
    with FakeTensorMode():
        fakes = [
            torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=input_dtypes[index] if input_dtypes else tensor.dtype,
                device=tensor.device,
            )
            for index, tensor in enumerate(inputs)
        ]
        args, kwargs = join_call(overload, fakes, attrs, torch.device(device_type))
        region = torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)
        recorder = _CastRecorder(fakes)
        with region, recorder:
            result = overload(*args, **kwargs)
        recorder.results = _dtypes(result)
        return recorder


def _dtypes(value: Any) -> tuple[torch.dtype, ...]:
    leaves = tree_leaves(value)
    return tuple(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor))
