"""An annotation tried on the function that it is of: split inputs, run, put together, compare.

Each identifier is split in 2 and in 3 parts, on an example or on random inputs of sizes 2 to 6; the
parts of a term of a sum (see `Dimop.terms`) are the value and zeros. Output: the annotation with
the inputs told apart that a sum shares and that are its terms, or AnnotationError with the
counterexample.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from shardwright.errors import AnnotationError
from shardwright.ops.annotation import STAR
from shardwright.ops.dimop import Dimop, InferredDimop, Slice, even_cuts

Function = Callable[..., Any]

DRAWS = 3
"""How many random calls are tried."""
SIZES = range(2, 7)
"""Sizes that are drawn where no example is given."""
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9}
"""Relative to the largest element; other floating-point types get `COARSE`, the rest 0."""
COARSE = 1e-3


@dataclass(frozen=True, slots=True)
class TrialSignature:
    """A function's parameters: names of tensors, names of the rest, and which rest are lengths.

    ``function`` takes tensors first; ``python`` has the parameters as the user wrote them.
    """

    function: Function
    python: inspect.Signature
    tensors: tuple[str, ...]
    rest: tuple[str, ...]
    lengths: frozenset[str]

    @property
    def flat(self) -> inspect.Signature:
        """The parameters of the operator: tensors first."""
        parameters = [self.python.parameters[name] for name in (*self.tensors, *self.rest)]
        return self.python.replace(parameters=parameters)

    def whole_numbers(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments, with those that are lengths as ints."""
        return {
            name: int(value) if name in self.lengths and value == int(value) else value
            for name, value in arguments.items()
        }


@dataclass(frozen=True, slots=True)
class TrialCall:
    """A call on which an annotation is tried: tensors in order, the other arguments by name."""

    tensors: list[torch.Tensor]
    rest: dict[str, Any]
    inference: InferredDimop


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a split gives that the whole does not."""

    identifier: str
    num: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A function called ``name`` and the annotation that is to be tried on it."""

    signature: TrialSignature
    dimop: Dimop
    name: str

    def tried(self, example: Sequence[Any] | Mapping[str, Any] | None) -> Dimop:
        """The annotation, with shared inputs and terms told apart. Raises AnnotationError."""
        given = list(self._drawn()) if example is None else [self._given(example)]
        calls = [TrialCall(*arguments, self._inferred(*arguments)) for arguments in given]
        dimop = self.dimop
        for call in calls:
            dimop = self._with_roles(dimop, call)
        for call in calls:
            for identifier in call.inference.annotation.reductions():
                mismatch = self._mismatch(dimop, call, identifier)
                if mismatch is not None:
                    raise self._counterexample(call, mismatch)
        return dimop

    def run(self, tensors: Sequence[torch.Tensor], rest: Mapping[str, Any]) -> list[torch.Tensor]:
        """The function's outputs as a list."""
        made = self.signature.function(*tensors, **rest)
        return [made] if isinstance(made, torch.Tensor) else list(made)

    def _failure(self, tensors: list[torch.Tensor], rest: dict[str, Any]) -> Exception | None:
        """What the function raises on arguments."""
        try:
            self.run(tensors, rest)
        except Exception as error:  # whatever a user's function raises
            return error
        return None

    # --- arguments ------------------------------------------------------------------------------

    def _given(
        self, example: Sequence[Any] | Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The example's arguments."""
        python, by_name = self.signature.python, isinstance(example, Mapping)
        try:
            bound = (
                python.bind(**example) if isinstance(example, Mapping) else python.bind(*example)
            )
        except TypeError as error:
            raise AnnotationError(
                f"{self.name}: the example's arguments, by {'name' if by_name else 'position'}, do "
                f"not fit {python}: {error}"
            ) from None
        bound.apply_defaults()
        arguments = self.signature.whole_numbers(bound.arguments)
        return [arguments.pop(name) for name in self.signature.tensors], arguments

    def _drawn(self) -> Iterator[tuple[list[torch.Tensor], dict[str, Any]]]:
        """Random arguments on which the function runs. Raises AnnotationError where none does."""
        failure: Exception | None = None
        for dtype in (torch.float64, torch.float32, torch.int64):
            drawn = [self._draw(seed, dtype) for seed in range(DRAWS)]
            failures = [self._failure(*arguments) for arguments in drawn]
            if None in failures:
                yield from (item for item, e in zip(drawn, failures, strict=True) if e is None)
                return
            failure = failure or failures[-1]
        raise AnnotationError(
            f"{self.name} does not run on random inputs of sizes {SIZES[0]} to {SIZES[-1]} "
            f"({type(failure).__name__}: {failure}); give example=, arguments on which it does"
        ) from failure

    def _draw(self, seed: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any]]:
        draws = random.Random(seed)
        stars = [f"{STAR}{i}" for i in range(1 + seed % 2)]
        annotation = self.dimop.annotation.with_stars_as(stars)
        lengths = {name: draws.choice(SIZES) for name in annotation.reductions()}
        distinct = draws.sample(SIZES, k=min(len(lengths), len(SIZES)))
        lengths |= dict(zip(lengths, distinct, strict=False))
        inference = InferredDimop(annotation, lengths, ())
        generator = torch.Generator().manual_seed(seed)
        tensors = [
            _random(map(inference.size, tensor.dims), dtype, generator)
            for tensor in annotation.inputs
            if tensor.dims is not None
        ]
        rest = {name: self._draw_rest(name, lengths, draws) for name in self.signature.rest}
        return tensors, rest

    def _draw_rest(self, name: str, lengths: Mapping[str, int], draws: random.Random) -> Any:
        """A length as drawn, the default of any other, and a float where there is none."""
        parameter = self.signature.python.parameters[name]
        if name in self.signature.lengths:
            return lengths[name]
        if parameter.default is not inspect.Parameter.empty:
            return parameter.default
        if parameter.annotation is float:
            return draws.uniform(0.5, 2.0)
        raise AnnotationError(
            f"{self.name}: {name} has no default and is no identifier, so the annotation cannot be "
            "tried; give example=, arguments of a call"
        )

    def _inferred(self, tensors: list[torch.Tensor], rest: dict[str, Any]) -> InferredDimop:
        """Lengths for the arguments; the outputs' shapes are compared with the function's."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        inference = self.dimop.infer(shapes, **rest)
        if (error := self._failure(tensors, rest)) is not None:
            raise AnnotationError(
                f"{self.name} does not run on the example: {type(error).__name__}: {error}"
            ) from error
        made = self.run(tensors, rest)
        if len(made) != len(inference.outputs):
            raise AnnotationError(
                f"{self.name} returns {len(made)} tensors, but {str(self.dimop)!r} has "
                f"{len(inference.outputs)} outputs"
            )
        for index, (tensor, shape) in enumerate(zip(made, inference.outputs, strict=True)):
            if shape is not None and tuple(tensor.shape) != shape:
                raise inference.annotation.error(
                    f"{self.name}: output {index} has shape {tuple(tensor.shape)} for inputs "
                    f"{', '.join(map(str, shapes))}; the annotation says {shape}",
                    inference.annotation.outputs[index].column,
                )
        return inference

    # --- splits ---------------------------------------------------------------------------------

    def _with_roles(self, dimop: Dimop, call: TrialCall) -> Dimop:
        """The Dimop with the inputs that lack a summed identifier told apart: shared, or terms."""
        for identifier, reduction in call.inference.annotation.reductions().items():
            undecided = [
                idx
                for idx, tensor in enumerate(call.inference.annotation.inputs)
                if reduction == "+"
                and tensor.dims is not None
                and identifier not in tensor.names()
                and idx not in dimop.shared | dimop.terms
            ]
            for terms in _subsets(undecided):
                shared = dimop.shared | set(undecided) - set(terms)
                guess = Dimop(dimop.annotation, shared, dimop.terms | set(terms))
                if self._mismatch(guess, call, identifier) is None:
                    dimop = guess
                    break
        return dimop

    def _mismatch(self, dimop: Dimop, call: TrialCall, identifier: str) -> Mismatch | None:
        """How a split by ``identifier`` in 2 or 3 parts fails; None where it holds or is refused.

        An identifier with ``+`` that every split of is refused is wrong too: it is to be ``^``.
        """
        factor = call.inference.factor(identifier)
        reason = dimop.refusal(call.inference, factor)
        if reason is not None:
            summed = factor.reduction == "+" and "term of the sum" in reason
            return Mismatch(identifier, 2, reason) if summed else None
        for num in (2, 3):
            if num <= call.inference.lengths[identifier]:
                reason = self._difference_in_parts(dimop, call, identifier, num)
                if reason is not None:
                    return Mismatch(identifier, num, reason)
        return None

    def _difference_in_parts(
        self, dimop: Dimop, call: TrialCall, identifier: str, num: int
    ) -> str | None:
        """How the outputs of ``num`` parts differ from those of the whole; None if they do not."""
        parts = [
            dimop.part(call.inference, {identifier: cut}, call.rest)
            for cut in even_cuts(call.inference.lengths[identifier], num)
        ]
        whole, made = self.run(call.tensors, call.rest), []
        for part in parts:
            slices = [where for where in part.inputs if where is not None]
            try:
                made.append(self.run(list(map(take, call.tensors, slices)), part.kwargs))
            except Exception as error:  # whatever a user's function raises on slices
                return f"a part does not run: {type(error).__name__}: {error}"
        for index, expected in enumerate(whole):
            outputs = zip(parts, made, strict=True)
            pieces = [(part.outputs[index], item[index]) for part, item in outputs]
            if (reason := _difference(index, pieces, expected)) is not None:
                return reason
        return None

    def _counterexample(self, call: TrialCall, mismatch: Mismatch) -> AnnotationError:
        """The error that shows on which inputs the annotation fails."""
        inputs = [
            f"{name} = {[round(x, 4) for x in tensor.flatten().tolist()]} of shape "
            f"{tuple(tensor.shape)}"
            for name, tensor in zip(self.signature.tensors, call.tensors, strict=True)
        ]
        inputs += [f"{name} = {value!r}" for name, value in call.rest.items()]
        factor = call.inference.factor(mismatch.identifier)
        of_star = mismatch.identifier not in self.dimop.annotation.reductions()
        written = STAR if of_star else factor.name
        return call.inference.annotation.error(
            f"{self.name}: the annotation does not hold: in {mismatch.num} parts by {written!r}, "
            f"{mismatch.reason}; write '{written}^', as it may not be split, or correct the "
            f"annotation. Inputs: {'; '.join(inputs)}",
            factor.column,
        )


def _random(sizes: Iterator[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.int64:
        return torch.randint(0, SIZES[0], tuple(sizes), generator=generator)
    return torch.randn(*sizes, dtype=dtype, generator=generator)


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(items) + 1):
        yield from itertools.combinations(items, size)


# --- comparing ------------------------------------------------------------------------------------


def take(tensor: torch.Tensor, where: Slice) -> torch.Tensor:
    """A part's slice of a tensor; of a term, zeros in all parts but the first."""
    for dim, (start, end) in enumerate(where.ranges):
        tensor = tensor.narrow(dim, start, end - start)
    late = where.partial is not None and where.partial[0] > 0
    return torch.zeros_like(tensor) if late else tensor.clone()


def _difference(
    index: int, pieces: Sequence[tuple[Slice | None, torch.Tensor]], expected: torch.Tensor
) -> str | None:
    """How pieces of an output, put together, differ from the whole."""
    for number, (where, piece) in enumerate(pieces):
        if where is not None and tuple(piece.shape) != where.shape:
            return (
                f"output {index} of part {number} has shape {tuple(piece.shape)}; expected "
                f"{where.shape}"
            )
    slices = [where for where, _ in pieces if where is not None]
    tensors = [piece for _, piece in pieces]
    if slices and slices[0].partial is not None:
        joined = reduce(torch.add, tensors)
    else:
        joined = torch.zeros_like(expected)
        for where, piece in zip(slices, tensors, strict=True):
            joined[tuple(slice(*range_) for range_ in where.ranges)] = piece
    if same(joined, expected):
        return None
    distance = (joined.to(torch.complex128) - expected).abs().nan_to_num(torch.inf)
    flat = distance.argmax() if distance.numel() else torch.tensor(0)
    place = tuple(int(i) for i in torch.unravel_index(flat, distance.shape))
    return (
        f"output {index} at {place} is {expected[place].item():.6g} of the whole, but "
        f"{joined[place].item():.6g} put together"
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    if one.numel() == 0:
        return True
    tolerance = TOLERANCE.get(one.dtype, COARSE)
    finite = torch.isfinite(other)
    if not torch.equal(torch.isfinite(one), finite):
        return False
    if not torch.equal(one[~finite].nan_to_num(0, 1, -1), other[~finite].nan_to_num(0, 1, -1)):
        return False
    scale = other[finite].abs().max().item() if bool(finite.any()) else 0.0
    return bool(((one - other)[finite].abs() <= tolerance * scale).all())
