"""Operators: from a name to torch's overload, and from a Python call to (tensors, attrs) and back.

``join_call(op, *split_call(op, args, kwargs))`` is the same call with defaults written out.

Only overloads of allowed namespaces are found, so a graph read from a file cannot reach any other
code. A name without a dot (``Backward``) is a marker: it has no overload and cannot be executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from shardwright.errors import GraphError
from shardwright.ir.values import SLOT, Input, IRNode
from shardwright.lazy import supplied
from shardwright.torch_internals import OpOverload, operator_of, overload_of, schema_of

T = TypeVar("T")

_built_in_namespaces = ("aten",)
_allowed_namespaces = {*_built_in_namespaces, "shardwright"}
_allowed_operators: set[str] = set()


def is_built_in(op: str) -> bool:
    """Whether every process has the operator; others are users' own, registered by a module."""
    namespace = op.partition(".")[0]
    if namespace == "shardwright":
        return op in supplied("operators")
    return namespace in _built_in_namespaces


def allow_namespace(namespace: str) -> None:
    """Let graphs use the operators of ``torch.ops.<namespace>``."""
    _allowed_namespaces.add(namespace)


def allow_operator(op: str) -> None:
    """Let graphs use the one operator with this full name."""
    _allowed_operators.add(op)


def is_random(node: IRNode, *, in_training: bool = False) -> bool:
    """Whether a call of ``node`` draws random numbers: its place among others matters then.

    With ``in_training`` as if what says whether the model trains said so.
    """
    attrs = node.attrs
    if "dropout_p" in attrs:
        return bool(attrs["dropout_p"] > 0)
    if "train" in attrs:
        rate = attrs.get("p", attrs.get("dropout", 1))
        return (in_training or attrs["train"] is not False) and rate != 0
    return not is_marker(node.op) and _draws(node.op)


@cache
def _draws(op: str) -> bool:
    return torch.Tag.nondeterministic_seeded in resolve(op).tags


MERGES = ("aten.reshape.default", "aten.view.default", "aten.flatten.using_ints")
"""Operators that may merge dimensions, and compute nothing."""


def is_marker(op: str) -> bool:
    """Whether ``op`` names no torch operator but a step that lowering expands."""
    return "." not in op


def operator_name(overload: OpOverload) -> str:
    """``torch.ops.aten.add.Tensor`` is ``aten.add.Tensor``."""
    return f"{overload.namespace}.{operator_of(overload)}.{overload_of(overload)}"


@cache
def resolve(op: str) -> OpOverload:
    """The overload with this full name. Raises GraphError where there is none or it is barred."""
    if is_marker(op):
        raise GraphError(
            f"{op!r} is a marker, a step of training that torch cannot run as it stands; build a "
            "pipeline of the graph (sw.build), or train with it (sw.train)"
        )
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    if namespace not in _allowed_namespaces and op not in _allowed_operators:
        raise GraphError(
            f"operator {op!r}: namespace {namespace!r} is not allowed (allowed are "
            f"{', '.join(sorted(_allowed_namespaces))}); register the operator first, or import "
            "the module that does"
        )
    if namespace == "shardwright":
        supplied("operators")  # Registers them.
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, RuntimeError, ValueError):
        found = None
    if not isinstance(found, OpOverload):
        raise GraphError(
            f"operator {op!r} does not exist in torch {torch.__version__}; names are "
            "namespace.operator.overload, as aten.linear.default"
        )
    return found


@dataclass(frozen=True, slots=True)
class SchemaArgument:
    """One argument of an operator's schema."""

    name: str
    keyword_only: bool
    required: bool
    default: Any
    is_device: bool
    type: str
    """The schema's word for what it takes: ``Tensor``, ``Optional[Layout]``, ``List[int]``."""
    takes_tensor: bool
    """Whether it takes one tensor; torch takes a tensor of one element for a number."""
    length: int | None
    """Of a list in whose place Python may give one number: how often it is repeated."""


@dataclass(frozen=True, slots=True)
class OperatorSignature:
    """What is read of an operator's schema."""

    parameters: tuple[SchemaArgument, ...]
    returns_one: bool
    """Whether a call returns one tensor rather than a tuple or a list of them."""
    returned: int | None
    """How many tensors a call returns; None where a list of them is among what it returns."""
    nested: bool
    """Whether a call returns several lists, as optimizers of many parameters do."""


_TENSOR_TYPES = ("Tensor", "Optional[Tensor]", "number", "Optional[number]")


@cache
def signature(overload: OpOverload) -> OperatorSignature:
    """The signature of an overload."""
    schema = schema_of(overload)
    parameters = tuple(
        SchemaArgument(
            argument.name,
            argument.kwarg_only,
            not argument.has_default_value(),
            argument.default_value if argument.has_default_value() else None,
            str(argument.type) in ("Device", "Optional[Device]"),
            str(argument.real_type),
            str(argument.type) in _TENSOR_TYPES,
            argument.N,  # type: ignore[attr-defined]
        )
        for argument in schema.arguments
    )
    returns = [str(item.type) for item in schema.returns]
    returned = None if any(item.startswith("List") for item in returns) else len(returns)
    nested = returned is None and len(returns) > 1
    return OperatorSignature(parameters, returns == ["Tensor"], returned, nested)


def flatten_results(made: Any) -> list[Any]:
    """What a call returns as one list: the tensors of several lists one after another."""
    items = made if isinstance(made, (list, tuple)) else [made]
    return [
        tensor for item in items for tensor in (item if isinstance(item, (list, tuple)) else [item])
    ]


def split_call(
    overload: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    is_tensor: Callable[[Any], bool] = lambda value: isinstance(value, torch.Tensor),
) -> tuple[list[Any], dict[str, Any]]:
    """Tensors and attrs of a call, in the form of `IRNode`.

    ``is_tensor`` says what is a tensor among the arguments: a tensor, an fx node, an
    IRValue. Raises GraphError where the call does not fit the schema.
    """
    bound = _bind(overload, args, kwargs)
    tensors = [value for value in bound.values() if is_tensor(value)]
    attrs: dict[str, Any] = {}
    for parameter in signature(overload).parameters:
        value = bound[parameter.name]
        if not is_tensor(value):
            attrs[parameter.name] = _attribute(value, tensors, is_tensor)
    _leave_devices_to_slot(overload, attrs, has_inputs=bool(tensors))
    return tensors, attrs


def _bind(overload: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of the schema with its value, in the schema's order."""
    parameters = signature(overload).parameters
    positional = [p for p in parameters if not p.keyword_only]
    by_place = dict(zip((p.name for p in positional), args, strict=False))
    given = by_place | kwargs
    wrong = (given.keys() - {p.name for p in parameters}) | (by_place.keys() & kwargs.keys())
    missing = [p.name for p in parameters if p.required and p.name not in given]
    if len(args) > len(positional) or wrong or missing:
        raise GraphError(
            f"a call of {operator_name(overload)} with {len(args)} positional arguments and "
            f"keywords {sorted(kwargs)} does not fit its schema {schema_of(overload)}"
        )
    return {p.name: given.get(p.name, p.default) for p in parameters}


def _attribute(value: Any, tensors: list[Any], is_tensor: Callable[[Any], bool]) -> Any:
    """``value`` as an attribute; tensors inside lists are appended to ``tensors``."""
    if is_tensor(value):
        tensors.append(value)
        return Input(len(tensors) - 1)
    if isinstance(value, (list, tuple)):
        return [_attribute(item, tensors, is_tensor) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return math.nan  # one object, so that equal calls have equal attributes
    return value


def _leave_devices_to_slot(
    overload: OpOverload, attrs: dict[str, Any], *, has_inputs: bool
) -> None:
    """A device that is named, and the default one of a call without tensors, is the slot's."""
    for parameter in signature(overload).parameters:
        if parameter.is_device and (attrs[parameter.name] is not None or not has_inputs):
            attrs[parameter.name] = SLOT


def join_call(
    overload: OpOverload, inputs: Sequence[Any], attrs: dict[str, Any], device: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of the call that a node stores, with ``device`` for `SLOT`.

    Raises GraphError where inputs and attrs do not fill the schema exactly.
    """
    values = named_arguments(overload, inputs, attrs, device)
    parameters = signature(overload).parameters
    args = tuple(values[p.name] for p in parameters if not p.keyword_only)
    return args, {p.name: values[p.name] for p in parameters if p.keyword_only}


def named_arguments(
    overload: OpOverload, inputs: Sequence[Any], attrs: dict[str, Any], device: Any = None
) -> dict[str, Any]:
    """The arguments that `join_call` gives, by the schema's names and in its order.

    Raises GraphError as it does.
    """
    parameters = signature(overload).parameters
    direct = iter(inputs)
    values = {
        p.name: substitute(attrs[p.name], inputs, device) if p.name in attrs else next(direct, None)
        for p in parameters
    }
    expected = len(parameters) - len(attrs) + sum(1 for _ in listed_inputs(list(attrs.values())))
    if attrs.keys() - values.keys() or expected != len(inputs):
        raise GraphError(
            f"{operator_name(overload)} with {len(inputs)} inputs and attributes "
            f"{', '.join(attrs) or 'none'} does not fit its schema {schema_of(overload)}"
        )
    return values


def substitute(value: Any, inputs: Sequence[Any], device: Any) -> Any:
    """An attribute with its inputs and its device filled in."""
    if isinstance(value, Input):
        return inputs[value.index]
    if isinstance(value, list):
        return [substitute(item, inputs, device) for item in value]
    return device if value is SLOT else value


def listed_inputs(value: Any) -> Iterator[int]:
    """The indices of the inputs inside an attribute, or a list of them, in order."""
    if isinstance(value, Input):
        yield value.index
    elif isinstance(value, list):
        for item in value:
            yield from listed_inputs(item)


# --- calls that a file writes out -----------------------------------------------------------------
#
# torch takes a dtype for a number, since both are numbers to it, and fills in what a call leaves
# out. A file is held to more: every argument is written, and is of the kind that the schema says,
# so that what a file computes is all in the file.

_INT64 = range(-(2**63), 2**63)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and value in _INT64


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (_is_int(value) and not isinstance(value, bool))


def _is_number(value: Any) -> bool:
    return _is_float(value) or isinstance(value, bool | complex)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", _is_int),
    "float": ("a number", _is_float),
    "number": ("a number", _is_number),
    "complex": ("a number", lambda value: _is_float(value) or isinstance(value, complex)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "Tensor": ("a tensor", _is_number),
    "str": ("a string", lambda value: isinstance(value, str)),
    "ScalarType": ("a dtype", lambda value: isinstance(value, torch.dtype)),
    "Layout": ("a layout", lambda value: isinstance(value, torch.layout)),
    "MemoryFormat": ("a memory format", lambda value: isinstance(value, torch.memory_format)),
    "Device": ("the slot's device", lambda value: value is SLOT),
}
"""Kinds of arguments by the schema's name for them: in words, and whether a value is one.

torch takes a number for a tensor, as in ``x * 2``, and a tensor of one element for a number.
"""


def check_written(
    overload: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_tensor: Callable[[Any], bool],
) -> None:
    """Raise GraphError where a call lacks an argument, has one too many, or one of another kind."""
    parameters = signature(overload).parameters
    by_place = [p for p in parameters if not p.keyword_only]
    by_name = {p.name: p for p in parameters if p.keyword_only}
    if len(args) != len(by_place) or kwargs.keys() != by_name.keys():
        raise GraphError(
            f"has {len(args)} positional arguments and the keywords "
            f"{', '.join(sorted(kwargs)) or 'none'}; every argument of the operator's schema is "
            f"written, defaults too: {', '.join(p.name for p in by_place) or 'none'} by position, "
            f"{', '.join(by_name) or 'none'} by keyword"
        )
    given = [*zip(by_place, args, strict=True), *((p, kwargs[n]) for n, p in by_name.items())]
    for parameter, value in given:
        if not (
            _is_default(parameter, value) or _fits(parameter.type, parameter, value, is_tensor)
        ):
            raise GraphError(
                f"has {_described(value, is_tensor)} for the argument {parameter.name!r}; "
                f"{operator_name(overload)} takes {_expected(parameter.type)} there"
            )


def _is_default(parameter: SchemaArgument, value: Any) -> bool:
    """Whether it is the schema's own default: torch spells that of a memory format as a number."""
    default = parameter.default
    return not parameter.required and type(value) is type(default) and bool(value == default)


def _fits(
    kind: str, parameter: SchemaArgument, value: Any, is_tensor: Callable[[Any], bool]
) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(_inner(kind), parameter, value, is_tensor)
    if kind.startswith("List["):
        if isinstance(value, list):
            return all(_fits(_inner(kind), parameter, item, is_tensor) for item in value)
        return parameter.length is not None and _fits(_inner(kind), parameter, value, is_tensor)
    if is_tensor(value):
        return kind in ("Tensor", "number")
    return kind in _KINDS and _KINDS[kind][1](value)


def _inner(kind: str) -> str:
    """``List[Optional[Tensor]]`` is of ``Optional[Tensor]``."""
    return kind.partition("[")[2].removesuffix("]")


def _expected(kind: str) -> str:
    if kind.startswith("Optional["):
        return f"{_expected(_inner(kind))} or null"
    if kind.startswith("List["):
        return f"a list, each {_expected(_inner(kind))}"
    return _KINDS[kind][0] if kind in _KINDS else "null"


def _described(value: Any, is_tensor: Callable[[Any], bool]) -> str:
    if is_tensor(value):
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
