"""Operators of a user's own: a Python function of tensors becomes a `torch.library` operator.

    @register_op("(h^ m^) kd+, kd+ n -> h^ m^ n", name="matmul_custom")
    def operator(x: torch.Tensor, w: torch.Tensor, h: int) -> torch.Tensor: ...

The operator ``shardwright.matmul_custom.default`` is one node of a captured graph, can be
differentiated, and is split as its annotation says, which was tried (`trial`). Its outputs share
memory with no input and with no other output; on fake tensors the function itself is run.

The annotation names the tensors; what is no tensor comes last, or has ``?`` in its place, and gives
the lengths of identifiers of its name.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.errors import AnnotationError
from shardwright.ir.operators import allow_namespace, resolve
from shardwright.ops.annotation import Annotation
from shardwright.ops.bound import BoundDimop, bind
from shardwright.ops.call import CatalogCall, Local, Rule
from shardwright.ops.dimop import Dimop
from shardwright.ops.trial import Function, Trial, TrialSignature
from shardwright.torch_internals import storage_key

NAMESPACE = "shardwright"


@dataclass(frozen=True, slots=True)
class Registered:
    """An operator of a user's own.

    ``op`` is the full name in a graph; ``module`` is what a worker imports to have it.
    """

    op: str
    dimop: Dimop
    module: str
    function: Function


_registered: dict[str, Registered] = {}


def registered(op: str) -> Registered | None:
    """What was registered under the full name of an operator."""
    return _registered.get(op)


def register_op(
    annotation: str,
    name: str | None = None,
    *,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    backward: Function | None = None,
) -> Callable[[Function], Function]:
    """A decorator that makes a function of tensors one operator.

    name
        The operator's name in the namespace ``shardwright``, or ``"namespace::name"``; by default
        the function's.
    example
        Arguments, by position or by name, on which the annotation is tested; by default random
        tensors of sizes 2 to 6.
    backward
        ``backward(grads, *args)`` returns the gradient of each tensor argument, or None, from the
        gradients of the outputs and the arguments of the call. By default the function is run again
        under autograd.

    Parameters and result need type annotations: tensors, and int, float, bool, str, or lists of
    them, which come last or have ``?`` in the annotation. Outputs that share memory with inputs are
    copied. Raises AnnotationError if the annotation is wrong or cannot be tested.
    """
    dimop = Dimop.parse(annotation)

    def register(function: Function) -> Function:
        return _register(function, dimop, name or function.__name__, example, backward)

    return register


def _register(
    function: Function,
    dimop: Dimop,
    name: str,
    example: Sequence[Any] | Mapping[str, Any] | None,
    backward: Function | None,
) -> Function:
    namespace, _, short = name.rpartition("::")
    namespace = namespace or NAMESPACE
    if not (namespace.isidentifier() and short.isidentifier()):
        raise AnnotationError(
            f"{name!r} is no name of an operator; expected an identifier, or namespace::name"
        )
    op = f"{namespace}.{short}.default"
    _refuse_second(op, function)
    signature = _signature_of(function, dimop)
    dimop = Trial(signature, _of_tensors(dimop), short).tried(example)
    custom = _define(f"{namespace}::{short}", signature, backward)
    allow_namespace(namespace)
    resolve.cache_clear()
    _registered[op] = Registered(op, dimop, function.__module__, function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.python.bind(*args, **kwargs)
        bound.apply_defaults()
        values = signature.whole_numbers(bound.arguments)
        return custom(*(values[name] for name in (*signature.tensors, *signature.rest)))

    return call


def _of_tensors(dimop: Dimop) -> Dimop:
    """The annotation of the operator, whose tensors come first, without ``?`` before them."""
    inputs = dimop.annotation.inputs
    tensors = tuple(tensor for tensor in inputs if tensor.dims is not None)
    if inputs[: len(tensors)] == tensors:
        return dimop
    return Dimop.parse(str(Annotation(tensors, dimop.annotation.outputs)))


def _refuse_second(op: str, function: Function) -> None:
    """Raise where another function has the name; the same one may be defined again."""
    before = _registered.get(op)
    place = (function.__module__, function.__qualname__)
    if before and (before.module, before.function.__qualname__) != place:
        raise AnnotationError(
            f"operator {op} is registered already, by {before.function.__qualname__} of module "
            f"{before.module}; give another name="
        )


def bind_registered(operator: Registered, call: CatalogCall) -> BoundDimop:
    """A call of a registered operator, to be split as its annotation says."""
    reductions = operator.dimop.annotation.reductions()
    given = {name: int(call.attrs[name]) for name in reductions if name in call.attrs}

    def attrs(local: Local) -> dict[str, int]:
        return {name: local.lengths[name] for name in given}

    rule = Rule(
        str(operator.dimop),
        lengths=given,
        terms=operator.dimop.terms,
        attrs=attrs if given else None,
    )
    return bind(call, rule, "registered")


# --- signatures ---------------------------------------------------------------------------------


def _signature_of(function: Function, dimop: Dimop) -> TrialSignature:
    """A function's parameters.

    Raises AnnotationError where types are missing or do not go with the annotation.
    """
    python = inspect.signature(function)
    hints = typing.get_type_hints(function)
    where = f"{function.__qualname__} of module {function.__module__}"
    missing = [name for name in (*python.parameters, "return") if name not in hints]
    if missing:
        raise AnnotationError(
            f"{where}: {', '.join(missing)} without a type; annotate every parameter and the "
            "result, as in (x: torch.Tensor, h: int) -> torch.Tensor"
        )
    for name in python.parameters:
        if hints[name] is not torch.Tensor and "Tensor" in _type_text(hints[name]):
            raise AnnotationError(
                f"{where}: {name} is a {_type_text(hints[name])}, which an operator of "
                "register_op cannot have; it takes tensors that are always there, each as a "
                "torch.Tensor parameter: register an operator for each form of the call"
            )
    tensors = tuple(name for name in python.parameters if hints[name] is torch.Tensor)
    rest = tuple(name for name in python.parameters if name not in tensors)
    expected = [tensor for tensor in dimop.annotation.inputs if tensor.dims is not None]
    if len(tensors) != len(expected):
        raise AnnotationError(
            f"{where} takes {len(tensors)} tensors ({', '.join(tensors) or 'none'}), but "
            f"{str(dimop)!r} has {len(expected)} inputs"
        )
    _check_order(where, python, tensors, dimop)
    lengths = frozenset(rest) & dimop.annotation.reductions().keys()
    parameters = [
        parameter.replace(annotation=int if name in lengths else hints[name])
        for name, parameter in python.parameters.items()
    ]
    typed = inspect.Signature(parameters, return_annotation=hints["return"])
    ordered = _tensors_first(function, (*tensors, *rest), tuple(python.parameters))
    return TrialSignature(ordered, typed, tensors, rest, lengths)


def _type_text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _check_order(
    where: str, python: inspect.Signature, tensors: tuple[str, ...], dimop: Dimop
) -> None:
    """Raise AnnotationError where ``?`` does not stand for what is no tensor, in its place."""
    names, inputs = tuple(python.parameters), dimop.annotation.inputs
    for name, tensor in zip(names, inputs, strict=False):
        if (name in tensors) != (tensor.dims is not None):
            marks = ", ".join("…" if name in tensors else "?" for name in names)
            raise AnnotationError(
                f"{where}: {name} is {'a' if name in tensors else 'no'} tensor, but stands where "
                f"{str(dimop)!r} has '{tensor}'; write its inputs in the order of the parameters, "
                f"with ? for what is no tensor before one: '{marks}'"
            )
    if any(name in tensors for name in names[len(inputs) :]):
        raise AnnotationError(f"{where}: {str(dimop)!r} has fewer inputs than there are parameters")


def _tensors_first(function: Function, given: tuple[str, ...], own: tuple[str, ...]) -> Function:
    """The function, called with its arguments in the order ``given``."""
    if given == own:
        return function

    @functools.wraps(function)
    def reordered(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(given, args, strict=False)) | kwargs
        return function(**values)

    return reordered


# --- the operator of torch.library --------------------------------------------------------------


def _define(name: str, signature: TrialSignature, backward: Function | None) -> Any:
    """The `torch.library` operator. Raises AnnotationError where it cannot have a type."""

    def compute(*args: Any) -> Any:
        return _without_aliases(signature.function(*args), args)

    compute.__signature__ = signature.flat  # type: ignore[attr-defined]
    try:
        schema = torch.library.infer_schema(compute, mutates_args=())
    except (ValueError, AttributeError) as error:  # torch 2.9 asks any type for its __origin__
        raise AnnotationError(
            f"{signature.function.__qualname__} has a parameter or result of a type that an "
            f"operator cannot have: {error}"
        ) from None
    operator = torch.library.custom_op(name, compute, mutates_args=(), schema=schema)
    operator.register_fake(compute)
    gradients = functools.partial(_rerun, signature)
    if backward is not None:
        gradients = functools.partial(_given_backward, signature, backward)
    operator.register_autograd(
        functools.partial(_backward, signature, gradients), setup_context=_save
    )
    return operator


def _without_aliases(made: Any, args: Sequence[Any]) -> Any:
    """The outputs, copied where their memory is an input's or an earlier output's."""
    taken = {storage_key(arg) for arg in args if isinstance(arg, torch.Tensor)}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone() if storage_key(tensor) in taken else tensor
        taken.add(storage_key(result))
        return result

    if isinstance(made, torch.Tensor):
        return own(made)
    return type(made)(own(tensor) for tensor in made)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the arguments for the backward."""
    ctx.save_for_backward(*(item for item in inputs if isinstance(item, torch.Tensor)))
    ctx.rest = [item for item in inputs if not isinstance(item, torch.Tensor)]


def _backward(signature: TrialSignature, gradients: Function, ctx: Any, *grads: Any) -> Any:
    """The gradient of each argument; None for what is no tensor."""
    given = grads[0] if len(grads) == 1 and isinstance(grads[0], (list, tuple)) else grads
    found = gradients(given, *ctx.saved_tensors, *ctx.rest)
    if found is None or isinstance(found, torch.Tensor):
        found = (found,)
    if len(found) != len(signature.tensors):
        raise AnnotationError(
            f"the backward of {signature.function.__qualname__} gives {len(found)} gradients; "
            f"expected one for each of {', '.join(signature.tensors)}"
        )
    return (*found, *[None] * len(signature.rest))


def _given_backward(signature: TrialSignature, backward: Function, grads: Any, *args: Any) -> Any:
    """The user's backward, on the arguments in the order that the function has them."""
    values = dict(zip((*signature.tensors, *signature.rest), args, strict=True))
    return backward(grads, *(values[name] for name in signature.python.parameters))


def _rerun(
    signature: TrialSignature, grads: Sequence[torch.Tensor | None], *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the tensors by running the function again under autograd."""
    count = len(signature.tensors)
    tensors = [
        tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        for tensor in args[:count]
    ]
    with torch.enable_grad():
        made = signature.function(*tensors, *args[count:])
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not pairs or not wanted:
        return (None,) * count
    found = iter(
        torch.autograd.grad(
            [output for output, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            allow_unused=True,
        )
    )
    return tuple(next(found) if tensor.requires_grad else None for tensor in tensors)
