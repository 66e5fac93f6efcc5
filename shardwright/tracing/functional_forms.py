"""From an operator that writes to its arguments to one that returns what they become.

Comes in: an overload whose schema is mutable, such as ``aten.add_.Tensor``, ``aten.fill_.Scalar``,
``aten.add.out`` or ``aten._foreach_add_.List``. Goes out: the functional overload with the same
parameters, such as ``aten.add.Tensor``, and which arguments it stands in for. What always holds:
the two have the same parameters, in order and by type, the written ones of an ``out=`` left out,
so the functional one draws the same random numbers and rounds alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardwright.torch_internals import OpOverload, operator_of, schema_of

FACTORY_OPTIONS = ("dtype", "layout", "device", "pin_memory")
"""Parameters that a factory has only where it makes its result itself, without ``out=``."""


@dataclass(frozen=True, slots=True)
class FunctionalForm:
    """``overload`` gives the new contents of the arguments named in ``writes``.

    ``reads`` maps its parameters to the arguments of the mutable call; ``takes_dtype`` says that
    it is a factory, and makes its result of the dtype it is told.
    """

    overload: OpOverload
    reads: tuple[tuple[str, str], ...]
    writes: tuple[str, ...]
    takes_dtype: bool


@cache
def functional_form(overload: OpOverload) -> FunctionalForm | None:
    """The functional form of a mutable overload, or None where torch has none."""
    arguments = schema_of(overload).arguments
    writes = tuple(argument.name for argument in arguments if _is_written(argument))
    kept = [argument for argument in arguments if not argument.is_out]
    for candidate in _candidates(overload):
        extra = _extra_parameters(kept, candidate)
        if extra is not None and _returns_enough(candidate, len(writes)):
            found = schema_of(candidate).arguments[: len(kept)]
            reads = tuple((to.name, at.name) for to, at in zip(found, kept, strict=True))
            return FunctionalForm(candidate, reads, writes, "dtype" in extra)
    return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _candidates(overload: OpOverload) -> Iterator[OpOverload]:
    """Overloads that do not write, of the packets that may hold the functional form."""
    name = operator_of(overload)
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    namespace = getattr(torch.ops, overload.namespace)
    for packet_name in dict.fromkeys((plain, f"{plain}_functional", name)):
        packet = getattr(namespace, packet_name, None)
        for overload_name in packet.overloads() if packet else ():
            candidate = getattr(packet, overload_name)
            if not schema_of(candidate).is_mutable:
                yield candidate


def _extra_parameters(wanted: list[Any], candidate: OpOverload) -> set[str] | None:
    """What ``candidate`` takes beyond ``wanted``, if it is nothing but a factory's options."""
    found = schema_of(candidate).arguments
    extra = {argument.name for argument in found[len(wanted) :]}
    same = [str(argument.type) for argument in wanted] == [
        str(argument.type) for argument in found[: len(wanted)]
    ]
    return extra if same and extra <= set(FACTORY_OPTIONS) else None


def _returns_enough(candidate: OpOverload, count: int) -> bool:
    """Whether it returns at least ``count`` tensors, or a list of them."""
    returns = schema_of(candidate).returns
    return len(returns) >= count or any("List" in str(item.type) for item in returns)
