"""An annotation tried on the function that it is of, before the function becomes an operator.

In come a function, an annotation and perhaps an example; out comes the annotation with the inputs
told apart that a sum shares and that are its terms, or AnnotationError with the counterexample.
Each identifier is split in 2 and in 3 parts, on the example or on random inputs of sizes 2 to 6.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.errors import AnnotationError
from shardwright.ops.annotation import STAR, Annotation, Dim, Factor, TensorDims
from shardwright.ops.custom_op import Function, Signature
from shardwright.ops.dimop import Dimop, find_factor
from shardwright.ops.lengths import Inference
from shardwright.ops.trial import Mismatch, split_mismatch

DRAWS = 3
"""How many random calls are tried."""
SIZES = range(2, 7)
"""Sizes that are drawn where no example is given."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A function and the annotation that is to be tried on it."""

    function: Function
    signature: Signature
    dimop: Dimop
    name: str

    def run(self, tensors: list[torch.Tensor], rest: Mapping[str, Any]) -> list[torch.Tensor]:
        """The function's outputs as a list."""
        made = self.function(*tensors, **rest)
        return [made] if isinstance(made, torch.Tensor) else list(made)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Of one call: tensors in order, the others by name."""

    tensors: list[torch.Tensor]
    rest: dict[str, Any]


def tried(subject: Subject, example: Sequence[Any] | Mapping[str, Any] | None) -> Dimop:
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


def _given(subject: Subject, example: Sequence[Any] | Mapping[str, Any]) -> Arguments:
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
    return Arguments(tensors, arguments)


def _drawn(subject: Subject) -> Iterator[Arguments]:
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


def _failure(subject: Subject, arguments: Arguments) -> Exception | None:
    """What the function raises on arguments."""
    try:
        subject.run(arguments.tensors, arguments.rest)
    except Exception as error:  # whatever a user's function raises
        return error
    return None


def _draw(subject: Subject, seed: int, dtype: torch.dtype) -> Arguments:
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
    return Arguments(tensors, _drawn_rest(subject, sizes, draws))


def _drawn_rest(subject: Subject, sizes: Mapping[str, int], draws: random.Random) -> dict[str, Any]:
    """Lengths as drawn, defaults for the others, and a float where there is none."""
    rest: dict[str, Any] = {}
    for name in subject.signature.rest:
        parameter = subject.signature.python.parameters[name]
        default = parameter.default
        if name in subject.signature.lengths:
            rest[name] = sizes[name]
        elif default is not inspect.Parameter.empty:
            rest[name] = default
        elif parameter.annotation is float:
            rest[name] = draws.uniform(0.5, 2.0)
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


def _inferred(subject: Subject, arguments: Arguments) -> Inference:
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
    subject: Subject, dimop: Dimop, arguments: Arguments, inference: Inference
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
    subject: Subject,
    dimop: Dimop,
    arguments: Arguments,
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
    subject: Subject, arguments: Arguments, inference: Inference, mismatch: Mismatch
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
