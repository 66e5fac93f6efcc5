"""What an annotation means for given shapes: lengths, output shapes, and the ways to split.

In come an `Annotation` and the shapes of the inputs (with keyword arguments that give lengths);
out come `Inference` and `Part`. What always holds: running the operator on the parts' inputs and
putting the outputs together (joined where they are slices, added where they are partial) gives
what the operator gives for the whole, provided the annotation is true. Every split that the
annotation does not warrant raises AnnotationError:

- of a number, of an identifier with ``^``, of a length below the number of parts;
- of an identifier that an output lacks, unless it has ``+``;
- of an identifier that stands twice in one tensor: the parts would miss what is off the diagonal;
- of an identifier that is not outermost in its brackets: its parts are no slices;
- of an identifier with ``+`` where an input lacks it that may be a term of the sum (a bias): each
  part would add it. An input may be such a term if all its identifiers stand in the partial
  output. An annotation cannot say more, so who knows more says it to `Dimop`: inputs that are no
  terms are ``shared``, inputs that are ``terms`` are partial themselves (part 0 takes the value,
  the others zeros, or each a part of a sum).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import AnnotationError
from shardwright.ops.annotation import Annotation, Dim, Factor, TensorDims, parse
from shardwright.ops.cuts import Cut, even_cuts
from shardwright.ops.lengths import Inference, Shape, infer


@dataclass(frozen=True, slots=True)
class Slice:
    """What a part has of a tensor: a range of each dimension, or one term of a sum.

    ranges
        Half-open, one a dimension of the whole.
    partial
        None, or (i, num): the whole is the sum of ``num`` tensors, of which this is number i.
    """

    ranges: tuple[tuple[int, int], ...]
    partial: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the slice."""
        return tuple(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a split operator; None stands where the annotation has ``?``.

    kwargs
        The keyword arguments, the split identifier's being the length of the part.
    """

    inputs: tuple[Slice | None, ...]
    outputs: tuple[Slice | None, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dimop:
    """An operator as its annotation describes it; the module's docstring has the rules.

    shared
        Inputs without a ``+`` identifier that are known not to be terms of the sum.
    terms
        Inputs without a ``+`` identifier that are known to be terms of the sum.
    """

    annotation: Annotation
    shared: frozenset[int] = frozenset()
    terms: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str, *, shared: Iterable[int] = (), terms: Iterable[int] = ()) -> Dimop:
        """The Dimop of an annotation. Raises AnnotationError that points at the column."""
        return cls(parse(text), frozenset(shared), frozenset(terms))

    def __str__(self) -> str:
        return str(self.annotation)

    def infer(self, shapes: Sequence[Shape | None], /, **kwargs: Any) -> Inference:
        """Lengths of identifiers and shapes of outputs.

        ``shapes`` has one entry an input; entries for ``?`` may be left out, or are ignored.
        Keyword arguments named as an identifier give its length. Raises AnnotationError.
        """
        return infer(self.annotation, shapes, kwargs)

    def algorithms(self, shapes: Sequence[Shape | None], /, **kwargs: Any) -> list[tuple[int, int]]:
        """Each way to split in two parts or more, as (input index, dimension).

        Two entries may name the same split, by different tensors that carry its identifier.
        """
        inference = self.infer(shapes, **kwargs)
        return [
            (idx, dim)
            for idx, tensor in enumerate(inference.annotation.inputs)
            for dim in range(len(tensor.dims or ()))
            if self.may_split(inference, outermost(inference, tensor, dim))
        ]

    def partition(
        self,
        shapes: Sequence[Shape | None],
        /,
        idx: int = 0,
        dim: int = 0,
        num: int = 2,
        **kwargs: Any,
    ) -> list[Part]:
        """The operator in ``num`` parts, by dimension ``dim`` of input ``idx``.

        Parts are as even as can be, larger ones first. Raises AnnotationError where the split
        would compute something else.
        """
        inference = self.infer(shapes, **kwargs)
        factor = factor_at(inference, idx, dim)
        if (reason := self.refusal(inference, factor)) is not None:
            raise inference.annotation.error(reason, factor.column)
        assert isinstance(factor.name, str)
        try:
            cuts = even_cuts(inference.lengths[factor.name], num)
        except AnnotationError as error:
            raise inference.annotation.error(f"{factor.name!r}: {error}", factor.column) from None
        return [self.part(inference, {factor.name: cut}, kwargs) for cut in cuts]

    def part(
        self, inference: Inference, cuts: Mapping[str, Cut], kwargs: Mapping[str, Any]
    ) -> Part:
        """What is left of the operator where each identifier of ``cuts`` is cut to its range.

        Several cuts at once are splits on several axes of a mesh. Raises AnnotationError.
        """
        for name in cuts:
            factor = find_factor(inference, name)
            if (reason := self.refusal(inference, factor)) is not None:
                raise inference.annotation.error(reason, factor.column)
        inputs = tuple(
            self._slice(inference, tensor, cuts, sums=idx in self.terms)
            for idx, tensor in enumerate(inference.annotation.inputs)
        )
        outputs = tuple(
            self._slice(inference, tensor, cuts, sums=True)
            for tensor in inference.annotation.outputs
        )
        changed = {name: cut.length for name, cut in cuts.items() if name in kwargs}
        return Part(inputs, outputs, {**kwargs, **changed})

    def may_split(self, inference: Inference, factor: Factor | None) -> bool:
        """Whether ``factor`` can be split in two parts."""
        if factor is None or self.refusal(inference, factor) is not None:
            return False
        return inference.length(factor) > 1

    def refusal(self, inference: Inference, factor: Factor) -> str | None:
        """Why ``factor`` may not be split, or None where it may."""
        name = factor.name
        if isinstance(name, int):
            return f"{name} is a number, which is never split; name the dimension to split it"
        if factor.reduction == "^":
            return f"'{name}^' may not be split"
        annotation = inference.annotation
        for tensor in annotation.tensors():
            if tensor.names().count(name) > 1:
                return (
                    f"{name!r} stands twice in '{tensor}'; its parts would miss what is off the "
                    "diagonal"
                )
            for dim in tensor.dims or ():
                if not _is_outermost(inference, dim, name):
                    return (
                        f"{name!r} is not outermost in '{dim}'; only the first identifier of a "
                        "bracket may be split"
                    )
        lacking = [t for t in annotation.outputs if t.dims is not None and name not in t.names()]
        if factor.reduction == "" and lacking:
            return (
                f"{name!r} is not in the output '{lacking[0]}'; an identifier that is summed over "
                f"is written '{name}+', one that must stay whole '{name}^'"
            )
        return self._added_twice(annotation, name, lacking)

    def _added_twice(
        self, annotation: Annotation, name: str, partial: Sequence[TensorDims]
    ) -> str | None:
        """Why some input would be added once a part, where it would."""
        for idx, tensor in enumerate(annotation.inputs):
            if tensor.dims is None or name in tensor.names() or idx in self.shared | self.terms:
                continue
            for output in partial:
                if set(tensor.names()) <= set(output.names()):
                    return (
                        f"input {idx} ('{tensor}') has no {name!r} and may be a term of the sum, "
                        f"which every part would add; take it out of the operator, or write "
                        f"'{name}^'"
                    )
        return None

    def _slice(
        self, inference: Inference, tensor: TensorDims, cuts: Mapping[str, Cut], *, sums: bool
    ) -> Slice | None:
        if tensor.dims is None:
            return None
        ranges = tuple(_range(inference, dim, cuts) for dim in tensor.dims)
        index, num = 0, 1
        for name, cut in cuts.items():
            if sums and name not in tensor.names() and _is_summed(inference, name):
                index, num = index * cut.num + cut.index, num * cut.num
        return Slice(ranges, (index, num) if num > 1 else None)


# --- finding a factor ---------------------------------------------------------------------------


def factor_at(inference: Inference, idx: int, dim: int) -> Factor:
    """What a split of dimension ``dim`` of input ``idx`` splits. Raises AnnotationError."""
    inputs = inference.annotation.inputs
    for name, number in (("idx", idx), ("dim", dim)):
        if type(number) is not int:
            raise AnnotationError(f"{name} is {number!r}; expected a number, counted from 0")
    if not 0 <= idx < len(inputs):
        raise AnnotationError(
            f"idx is {idx}; expected the number of an input, 0 to {len(inputs) - 1}"
        )
    tensor = inputs[idx]
    if tensor.dims is None:
        raise inference.annotation.error(f"input {idx} is no tensor", tensor.column)
    rank = len(tensor.dims)
    if not -rank <= dim < rank:
        raise inference.annotation.error(
            f"dim is {dim}; input {idx} ('{tensor}') has {rank} dimensions", tensor.column
        )
    return outermost(inference, tensor, dim)


def outermost(inference: Inference, tensor: TensorDims, dim: int) -> Factor:
    """The first factor of a dimension that is longer than 1; the first where none is."""
    assert tensor.dims is not None
    factors = tensor.dims[dim].factors
    return next((factor for factor in factors if inference.length(factor) > 1), factors[0])


def find_factor(inference: Inference, name: str) -> Factor:
    """The first place of an identifier. Raises AnnotationError where there is none."""
    for tensor in inference.annotation.tensors():
        for factor in tensor.factors():
            if factor.name == name:
                return factor
    raise AnnotationError(
        f"{str(inference.annotation)!r} has no identifier {name!r}; it has "
        f"{', '.join(inference.annotation.reductions()) or 'none'}"
    )


def _is_summed(inference: Inference, name: str) -> bool:
    return find_factor(inference, name).reduction == "+"


def _is_outermost(inference: Inference, dim: Dim, name: str) -> bool:
    """Whether all factors before ``name`` have length 1; true where it is not in ``dim``."""
    before = 1
    for factor in dim.factors:
        if factor.name == name:
            return before == 1
        before *= inference.length(factor)
    return True


def _range(inference: Inference, dim: Dim, cuts: Mapping[str, Cut]) -> tuple[int, int]:
    """The range of a dimension whose factors are cut; at most the outermost one is."""
    size = math.prod(inference.length(factor) for factor in dim.factors)
    for factor in dim.factors:
        if isinstance(factor.name, str) and factor.name in cuts:
            cut = cuts[factor.name]
            unit = size // inference.length(factor)
            return cut.start * unit, cut.end * unit
    return 0, size
