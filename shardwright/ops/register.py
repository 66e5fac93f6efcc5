"""Operators of a user's own: a Python function of tensors becomes a `torch.library` operator.

    @register_op("(h^ m^) kd+, kd+ n -> h^ m^ n", name="matmul_custom")
    def operator(x: torch.Tensor, w: torch.Tensor, h: int) -> torch.Tensor: ...

The operator ``shardwright.matmul_custom.default`` is one node of a captured graph, can be
differentiated, and is split as its annotation says. What always holds: the annotation was tried on
small random inputs, every split of it in 2 and 3 parts; a wrong one is refused with the
counterexample. An input that an identifier with ``+`` lacks is found by trial to be shared by the
parts or a term of their sum (see `dimop`).

The annotation names the tensors; what is no tensor comes last, or has ``?`` in its place, and gives
the lengths of identifiers of its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import AnnotationError
from shardwright.ir.operators import allow_namespace, resolve
from shardwright.ops.annotation import Annotation
from shardwright.ops.bound import BoundDimop, bind
from shardwright.ops.call import Call, Local, Rule
from shardwright.ops.custom_op import Function, Signature, define
from shardwright.ops.dimop import Dimop
from shardwright.ops.tried import Subject, tried

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
    """A decorator that makes an operator of a function of tensors.

    name
        Of the operator, in the namespace ``shardwright``, or ``"namespace::name"``; the
        function's by default.
    example
        Arguments, by position or by name, on which the annotation is tried; without it they are
        random, of sizes 2 to 6.
    backward
        ``backward(grads, *args)`` gives the gradient of each tensor argument, or None, for the
        gradients of the outputs and the arguments of the call; by default the function is run
        again under autograd.

    Parameters and result need type annotations: tensors, and int, float, bool, str, or lists of
    them, which come last or have ``?`` in the annotation. Outputs that share memory with inputs are
    copied. Raises AnnotationError where the annotation does not hold or cannot be tried.
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
    signature = Signature.of(function, dimop)
    dimop = tried(Subject(signature.function, signature, _of_tensors(dimop), short), example)
    custom = define(f"{namespace}::{short}", signature, backward)
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


def bind_registered(operator: Registered, call: Call) -> BoundDimop:
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
