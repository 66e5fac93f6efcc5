"""Operators of a user's own: a Python function of tensors becomes a `torch.library` operator.

    @register_op("(h^ m^) kd+, kd+ n -> h^ m^ n", name="matmul_custom")
    def operator(x: torch.Tensor, w: torch.Tensor, h: int) -> torch.Tensor: ...

The operator ``shardwright.matmul_custom.default`` is one node of a captured graph, can be
differentiated, and is split as its annotation says. What always holds: the annotation was tried on
small random inputs, every split of it in 2 and 3 parts; a wrong one is refused with the
counterexample. An input that an identifier with ``+`` lacks is found by trial to be shared by the
parts or a term of their sum (see `dimop`).

The annotation names the tensors; what is no tensor comes last and gives the lengths of identifiers
of its name.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.dimops.annotation import STAR, Annotation, Dim, Factor, TensorDims
from shardwright.dimops.bound import BoundDimop, bind
from shardwright.dimops.call import Call, Local, Rule
from shardwright.dimops.dimop import Dimop, Inference, find_factor
from shardwright.dimops.trial import Mismatch, split_mismatch
from shardwright.errors import AnnotationError
from shardwright.ir.operators import allow_namespace, resolve

Function = Callable[..., Any]
NAMESPACE = "shardwright"
DRAWS = 3
SIZES = range(2, 7)
"""Sizes that are drawn where no example is given."""


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

    Parameters and result need type annotations: tensors first, then int, float, bool, str, or
    lists of them. Outputs that share memory with inputs are copied. Raises AnnotationError where
    the annotation does not hold or cannot be tried.
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
    signature = _Signature.of(function, dimop)
    dimop = _tried(_Subject(function, signature, dimop, short), example)
    custom = _define(f"{namespace}::{short}", signature, backward)
    allow_namespace(namespace)
    resolve.cache_clear()
    _registered[op] = Registered(op, dimop, function.__module__, function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.python.bind(*args, **kwargs)
        bound.apply_defaults()
        return custom(*signature.whole_numbers(bound.arguments).values())

    return call


def _refuse_second(op: str, function: Function) -> None:
    """Raise where another function has the name; the same one may be defined again."""
    before = _registered.get(op)
    place = (function.__module__, function.__qualname__)
    if before and (before.module, before.function.__qualname__) != place:
        raise AnnotationError(
            f"operator {op} is registered already, by {before.function.__qualname__} of module "
            f"{before.module}; give another name="
        )


# --- signatures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Signature:
    """A function's parameters: names of tensors, names of the rest, and which rest are lengths."""

    function: Function
    python: inspect.Signature
    tensors: tuple[str, ...]
    rest: tuple[str, ...]
    lengths: frozenset[str]

    @classmethod
    def of(cls, function: Function, dimop: Dimop) -> _Signature:
        """Raises AnnotationError where types are missing or do not go with the annotation."""
        python = inspect.signature(function)
        hints = typing.get_type_hints(function)
        where = f"{function.__qualname__} of module {function.__module__}"
        missing = [name for name in (*python.parameters, "return") if name not in hints]
        if missing:
            raise AnnotationError(
                f"{where}: {', '.join(missing)} without a type; annotate every parameter and the "
                "result, as in (x: torch.Tensor, h: int) -> torch.Tensor"
            )
        tensors = tuple(name for name in python.parameters if hints[name] is torch.Tensor)
        rest = tuple(name for name in python.parameters if name not in tensors)
        if tuple(python.parameters)[: len(tensors)] != tensors:
            raise AnnotationError(f"{where}: {rest[0]} stands before a tensor; tensors come first")
        expected = [tensor for tensor in dimop.annotation.inputs if tensor.dims is not None]
        if len(tensors) != len(expected):
            raise AnnotationError(
                f"{where} takes {len(tensors)} tensors ({', '.join(tensors) or 'none'}), but "
                f"{str(dimop)!r} has {len(expected)} inputs"
            )
        lengths = frozenset(rest) & dimop.annotation.reductions().keys()
        parameters = [
            parameter.replace(annotation=int if name in lengths else hints[name])
            for name, parameter in python.parameters.items()
        ]
        typed = inspect.Signature(parameters, return_annotation=hints["return"])
        return cls(function, typed, tensors, rest, lengths)

    def whole_numbers(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments, with those that are lengths as ints."""
        return {
            name: int(value) if name in self.lengths and value == int(value) else value
            for name, value in arguments.items()
        }


# --- the operator ---------------------------------------------------------------------------------


def _define(name: str, signature: _Signature, backward: Function | None) -> Any:
    """The `torch.library` operator."""

    def compute(*args: Any) -> Any:
        return _without_aliases(signature.function(*args), args)

    compute.__signature__ = signature.python  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(compute, mutates_args=())
    operator = torch.library.custom_op(name, compute, mutates_args=(), schema=schema)
    operator.register_fake(compute)
    gradients = backward or functools.partial(_rerun, signature)
    operator.register_autograd(
        functools.partial(_backward, signature, gradients), setup_context=_save
    )
    return operator


def _without_aliases(made: Any, args: Sequence[Any]) -> Any:
    """The outputs, copied where their memory is an input's or an earlier output's."""
    taken = {_memory(arg) for arg in args if isinstance(arg, torch.Tensor)}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone() if _memory(tensor) in taken else tensor
        taken.add(_memory(result))
        return result

    if isinstance(made, torch.Tensor):
        return own(made)
    return type(made)(own(tensor) for tensor in made)


def _memory(tensor: torch.Tensor) -> int:
    """What two tensors have in common if they share memory, real or fake."""
    return int(tensor.untyped_storage()._cdata)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the arguments for the backward."""
    ctx.save_for_backward(*(item for item in inputs if isinstance(item, torch.Tensor)))
    ctx.rest = [item for item in inputs if not isinstance(item, torch.Tensor)]


def _backward(signature: _Signature, gradients: Function, ctx: Any, *grads: Any) -> Any:
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


def _rerun(
    signature: _Signature, grads: Sequence[torch.Tensor | None], *args: Any
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


# --- trying the annotation ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Subject:
    """A function and the annotation that is to be tried on it."""

    function: Function
    signature: _Signature
    dimop: Dimop
    name: str

    def run(self, tensors: list[torch.Tensor], rest: Mapping[str, Any]) -> list[torch.Tensor]:
        """The function's outputs as a list."""
        made = self.function(*tensors, **rest)
        return [made] if isinstance(made, torch.Tensor) else list(made)


@dataclass(frozen=True, slots=True)
class _Arguments:
    tensors: list[torch.Tensor]
    rest: dict[str, Any]


def _tried(subject: _Subject, example: Sequence[Any] | Mapping[str, Any] | None) -> Dimop:
    """The annotation, with what trial says of shared inputs and terms. Raises AnnotationError."""
    trials = [_given(subject, example)] if example is not None else list(_drawn(subject))
    dimop = subject.dimop
    inferences = [_inferred(subject, arguments) for arguments in trials]
    for arguments, inference in zip(trials, inferences, strict=True):
        dimop = _with_roles(subject, dimop, arguments, inference)
    for arguments, inference in zip(trials, inferences, strict=True):
        for identifier in inference.annotation.reductions():
            mismatch = _mismatch(subject, dimop, arguments, inference, identifier)
            if mismatch is not None:
                raise _counterexample(subject, arguments, inference, mismatch)
    return dimop


def _given(subject: _Subject, example: Sequence[Any] | Mapping[str, Any]) -> _Arguments:
    """The example's arguments."""
    by_name = isinstance(example, Mapping)
    try:
        bound = (
            subject.signature.python.bind(**example)
            if isinstance(example, Mapping)
            else subject.signature.python.bind(*example)
        )
    except TypeError as error:
        raise AnnotationError(
            f"{subject.name}: the example's arguments, by {'name' if by_name else 'position'}, do "
            f"not fit {subject.signature.python}: {error}"
        ) from None
    bound.apply_defaults()
    arguments = subject.signature.whole_numbers(bound.arguments)
    tensors = [arguments.pop(name) for name in subject.signature.tensors]
    return _Arguments(tensors, arguments)


def _drawn(subject: _Subject) -> Iterator[_Arguments]:
    """Random arguments on which the function runs. Raises AnnotationError where none does."""
    failure: Exception | None = None
    for dtype in (torch.float64, torch.float32, torch.int64):
        drawn = [_draw(subject, seed, dtype) for seed in range(DRAWS)]
        failures = [_failure(subject, arguments) for arguments in drawn]
        if None in failures:
            yield from (item for item, error in zip(drawn, failures, strict=True) if error is None)
            return
        failure = failure or failures[-1]
    raise AnnotationError(
        f"{subject.name} does not run on random inputs of sizes {SIZES[0]} to {SIZES[-1]} "
        f"({type(failure).__name__}: {failure}); give example=, arguments on which it does"
    ) from failure


def _failure(subject: _Subject, arguments: _Arguments) -> Exception | None:
    """What the function raises on arguments."""
    try:
        subject.run(arguments.tensors, arguments.rest)
    except Exception as error:  # whatever a user's function raises
        return error
    return None


def _draw(subject: _Subject, seed: int, dtype: torch.dtype) -> _Arguments:
    draws = random.Random(seed)
    annotation = _without_stars(subject.dimop.annotation, dims=1 + seed % 2)
    sizes = {name: draws.choice(SIZES) for name in annotation.reductions()}
    distinct = dict(zip(sizes, draws.sample(SIZES, k=min(len(sizes), len(SIZES))), strict=False))
    sizes |= distinct
    unlengthened = Inference(annotation, sizes, ())
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        _random([_product(unlengthened, dim) for dim in tensor.dims], dtype, generator)
        for tensor in annotation.inputs
        if tensor.dims is not None
    ]
    return _Arguments(tensors, _drawn_rest(subject, sizes))


def _drawn_rest(subject: _Subject, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Lengths as drawn, defaults for the others."""
    rest = {}
    for name in subject.signature.rest:
        default = subject.signature.python.parameters[name].default
        if name in subject.signature.lengths:
            rest[name] = sizes[name]
        elif default is not inspect.Parameter.empty:
            rest[name] = default
        else:
            raise AnnotationError(
                f"{subject.name}: {name} has no default and is no identifier, so the annotation "
                "cannot be tried; give example=, arguments of a call"
            )
    return rest


def _without_stars(annotation: Annotation, dims: int) -> Annotation:
    """``*`` as so many identifiers."""

    def written_out(tensor: TensorDims) -> TensorDims:
        if tensor.dims is None:
            return tensor
        found: list[Dim] = []
        for dim in tensor.dims:
            if dim.factors[0].name == STAR:
                found += [Dim((Factor(f"{STAR}{i}"),)) for i in range(dims)]
            else:
                found.append(dim)
        return TensorDims(tuple(found))

    return Annotation(
        tuple(map(written_out, annotation.inputs)), tuple(map(written_out, annotation.outputs))
    )


def _product(inference: Inference, dim: Dim) -> int:
    size = 1
    for factor in dim.factors:
        size *= inference.length(factor)
    return size


def _random(sizes: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.int64:
        return torch.randint(0, SIZES[0], tuple(sizes), generator=generator)
    return torch.randn(*sizes, dtype=dtype, generator=generator)


def _inferred(subject: _Subject, arguments: _Arguments) -> Inference:
    """Lengths for the arguments; the outputs' shapes are held against the function's."""
    shapes = [tuple(tensor.shape) for tensor in arguments.tensors]
    inference = subject.dimop.infer(shapes, **arguments.rest)
    if (error := _failure(subject, arguments)) is not None:
        raise AnnotationError(
            f"{subject.name} does not run on the example: {type(error).__name__}: {error}"
        ) from error
    made = subject.run(arguments.tensors, arguments.rest)
    if len(made) != len(inference.outputs):
        raise AnnotationError(
            f"{subject.name} returns {len(made)} tensors, but {str(subject.dimop)!r} has "
            f"{len(inference.outputs)} outputs"
        )
    for index, (tensor, shape) in enumerate(zip(made, inference.outputs, strict=True)):
        if shape is not None and tuple(tensor.shape) != shape:
            raise inference.annotation.error(
                f"{subject.name}: output {index} has shape {tuple(tensor.shape)} for inputs "
                f"{', '.join(map(str, shapes))}; the annotation says {shape}",
                inference.annotation.outputs[index].column,
            )
    return inference


def _with_roles(
    subject: _Subject, dimop: Dimop, arguments: _Arguments, inference: Inference
) -> Dimop:
    """The Dimop with the inputs that lack a summed identifier told apart: shared, or terms."""
    for identifier, reduction in inference.annotation.reductions().items():
        lacking = [
            idx
            for idx, tensor in enumerate(inference.annotation.inputs)
            if reduction == "+" and tensor.dims is not None and identifier not in tensor.names()
        ]
        undecided = [idx for idx in lacking if idx not in dimop.shared | dimop.terms]
        for terms in _subsets(undecided):
            guess = Dimop(
                dimop.annotation,
                dimop.shared | set(undecided) - set(terms),
                dimop.terms | set(terms),
            )
            if _mismatch(subject, guess, arguments, inference, identifier) is None:
                dimop = guess
                break
    return dimop


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(items) + 1):
        yield from itertools.combinations(items, size)


def _mismatch(
    subject: _Subject,
    dimop: Dimop,
    arguments: _Arguments,
    inference: Inference,
    identifier: str,
) -> Mismatch | None:
    """How a split by ``identifier`` in 2 or 3 parts fails; None where it holds or is refused.

    An identifier with ``+`` that every split of is refused is wrong too: it is to be ``^``.
    """
    factor = find_factor(inference, identifier)
    reason = dimop.refusal(inference, factor)
    if reason is not None:
        summed = factor.reduction == "+" and "term of the sum" in reason
        return Mismatch(identifier, 2, reason) if summed else None
    for num in (2, 3):
        if num <= inference.lengths[identifier]:
            found = split_mismatch(
                subject.run, dimop, inference, arguments.tensors, arguments.rest, identifier, num
            )
            if found is not None:
                return found
    return None


def _counterexample(
    subject: _Subject, arguments: _Arguments, inference: Inference, mismatch: Mismatch
) -> AnnotationError:
    """The error that shows on which inputs the annotation fails."""
    named = zip(subject.signature.tensors, arguments.tensors, strict=True)
    inputs = [
        f"{name} = {[round(x, 4) for x in tensor.flatten().tolist()]} of shape "
        f"{tuple(tensor.shape)}"
        for name, tensor in named
    ]
    inputs += [f"{name} = {value!r}" for name, value in arguments.rest.items()]
    factor = find_factor(inference, mismatch.identifier)
    written = (
        STAR if mismatch.identifier not in subject.dimop.annotation.reductions() else factor.name
    )
    return inference.annotation.error(
        f"{subject.name}: the annotation does not hold: in {mismatch.num} parts by {written!r}, "
        f"{mismatch.reason}; write '{written}^', as it may not be split, or correct the "
        f"annotation. Inputs: {'; '.join(inputs)}",
        factor.column,
    )


# --- splitting a call -----------------------------------------------------------------------------


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
