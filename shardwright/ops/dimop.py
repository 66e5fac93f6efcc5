"""What an annotation means for given shapes: lengths, output shapes, and the ways to split.

Running the operator on the parts' inputs and putting the outputs together (joined where they are
slices, added where they are partial) gives what the operator gives for the whole, provided the
annotation is true. Every split that the annotation does not warrant raises AnnotationError:

- of a number, of an identifier with ``^``, of a length below the number of parts;
- of an identifier that an output lacks, unless it has ``+``;
- of an identifier that stands twice in one tensor: the parts would miss what is off the diagonal;
- of an identifier that is not outermost in its brackets: its parts are no slices;
- of an identifier with ``+`` where an input lacks it that may be a term of the sum (a bias): each
  part would add it. An input may be such a term if all its identifiers stand in the partial
  output. What an annotation cannot say `Dimop` is told: ``shared`` inputs are no terms, ``terms``
  are partial themselves (part 0 takes the value, the others zeros, or each a part of a sum).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from shardwright.errors import AnnotationError
from shardwright.ops.annotation import STAR, Annotation, Dim, Factor, TensorDims, parse

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Cut:
    """Part ``index`` of ``num``: the half-open range ``start`` to ``end`` of an identifier.

    What a cut covers can be cut again, on another axis of a mesh, and still is one range.
    """

    start: int
    end: int
    index: int = 0
    num: int = 1

    @property
    def length(self) -> int:
        """How many values the part has."""
        return self.end - self.start

    def cut(self, num: int) -> list[Cut]:
        """This part in ``num`` parts of its own. Raises AnnotationError as `even_cuts`."""
        start, index = self.start, self.index * num
        return [
            Cut(start + part.start, start + part.end, index + part.index, self.num * num)
            for part in even_cuts(self.length, num)
        ]


def even_cuts(length: int, num: int) -> list[Cut]:
    """``length`` in ``num`` parts. Raises AnnotationError where a part would be empty."""
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise AnnotationError(f"num is {num!r}; expected the number of parts, 1 or more")
    if length < num:
        raise AnnotationError(f"a length of {length} does not give {num} parts of 1 or more")
    small, larger = divmod(length, num)
    bounds = [index * small + min(index, larger) for index in range(num + 1)]
    return [Cut(*span, index, num) for index, span in enumerate(pairwise(bounds))]


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
class OperatorPart:
    """One part of a split operator; None stands where the annotation has ``?``.

    kwargs
        The keyword arguments, the split identifier's being the length of the part.
    """

    inputs: tuple[Slice | None, ...]
    outputs: tuple[Slice | None, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferredDimop:
    """An annotation for given shapes.

    annotation
        With every ``*`` written out as identifiers.
    lengths
        The length of each identifier.
    outputs
        A shape each, None for ``?``.
    """

    annotation: Annotation
    lengths: dict[str, int]
    outputs: tuple[tuple[int, ...] | None, ...]

    def length(self, factor: Factor) -> int:
        """The length of an identifier, or the number itself."""
        return factor.name if isinstance(factor.name, int) else self.lengths[factor.name]

    def size(self, dim: Dim) -> int:
        """The size of a dimension."""
        return math.prod(map(self.length, dim.factors))

    def factor(self, name: str) -> Factor:
        """The first occurrence of an identifier. Raises AnnotationError where there is none."""
        for tensor in self.annotation.tensors():
            for factor in tensor.factors():
                if factor.name == name:
                    return factor
        names = ", ".join(self.annotation.reductions()) or "none"
        raise AnnotationError(
            f"{str(self.annotation)!r} has no identifier {name!r}; it has {names}"
        )

    def factor_at(self, idx: int, dim: int) -> Factor:
        """What a split of dimension ``dim`` of input ``idx`` splits. Raises AnnotationError."""
        inputs = self.annotation.inputs
        for name, number in (("idx", idx), ("dim", dim)):
            if type(number) is not int:
                raise AnnotationError(f"{name} is {number!r}; expected a number, counted from 0")
        if not 0 <= idx < len(inputs):
            raise AnnotationError(
                f"idx is {idx}; expected the number of an input, 0 to {len(inputs) - 1}"
            )
        tensor = inputs[idx]
        if tensor.dims is None:
            raise self.annotation.error(f"input {idx} is no tensor", tensor.column)
        rank = len(tensor.dims)
        if not -rank <= dim < rank:
            raise self.annotation.error(
                f"dim is {dim}; input {idx} ('{tensor}') has {rank} dimensions", tensor.column
            )
        return self.outermost(tensor.dims[dim])

    def outermost(self, dim: Dim) -> Factor:
        """The first factor of a dimension that is longer than 1; the first where none is."""
        return next((f for f in dim.factors if self.length(f) > 1), dim.factors[0])

    def range_of(self, dim: Dim, cuts: Mapping[str, Cut]) -> tuple[int, int]:
        """The range of a dimension whose factors are cut; at most the outermost one is."""
        size = self.size(dim)
        for factor in dim.factors:
            if isinstance(factor.name, str) and factor.name in cuts:
                cut, unit = cuts[factor.name], size // self.length(factor)
                return cut.start * unit, cut.end * unit
        return 0, size


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
        """Parse an annotation. Raises AnnotationError that points at the column."""
        return cls(parse(text), frozenset(shared), frozenset(terms))

    def __str__(self) -> str:
        return str(self.annotation)

    def infer(self, shapes: Sequence[Shape | None], /, **kwargs: Any) -> InferredDimop:
        """Sizes of identifiers and shapes of outputs.

        ``shapes`` has one entry per input; entries for ``?`` may be omitted, or are ignored. A
        keyword argument with the name of an identifier sets its size. Raises AnnotationError.
        """
        given = _all_shapes(self.annotation, shapes)
        annotation, lengths = _expand_stars(self.annotation, given)
        lengths |= _keyword_lengths(annotation, kwargs)
        _match_ranks(annotation, given)
        _solve(annotation, given, lengths)
        inference = InferredDimop(annotation, lengths, ())
        outputs = tuple(_output_shape(inference, tensor) for tensor in annotation.outputs)
        return replace(inference, outputs=outputs)

    def algorithms(self, shapes: Sequence[Shape | None], /, **kwargs: Any) -> list[tuple[int, int]]:
        """All ways to split into at least two parts, as (input index, dimension).

        Two entries may describe the same split, by different tensors that have its identifier.
        """
        return self.ways(self.infer(shapes, **kwargs))

    def ways(self, inference: InferredDimop) -> list[tuple[int, int]]:
        """The same, for shapes that are inferred."""
        return [
            (idx, number)
            for idx, tensor in enumerate(inference.annotation.inputs)
            for number, dim in enumerate(tensor.dims or ())
            if self.may_split(inference, inference.outermost(dim))
        ]

    def partition(
        self,
        shapes: Sequence[Shape | None],
        /,
        idx: int = 0,
        dim: int = 0,
        num: int = 2,
        **kwargs: Any,
    ) -> list[OperatorPart]:
        """Split the operator into ``num`` parts by dimension ``dim`` of input ``idx``.

        Parts are as even as possible, larger ones first. Raises AnnotationError if the split would
        compute something else.
        """
        inference = self.infer(shapes, **kwargs)
        factor = inference.factor_at(idx, dim)
        self.check(inference, factor)
        assert isinstance(factor.name, str)
        try:
            cuts = even_cuts(inference.lengths[factor.name], num)
        except AnnotationError as error:
            raise inference.annotation.error(f"{factor.name!r}: {error}", factor.column) from None
        return [self.part(inference, {factor.name: cut}, kwargs) for cut in cuts]

    def part(
        self, inference: InferredDimop, cuts: Mapping[str, Cut], kwargs: Mapping[str, Any]
    ) -> OperatorPart:
        """What is left of the operator where each identifier of ``cuts`` is cut to its range.

        Several cuts at once are splits on several axes of a mesh. Raises AnnotationError.
        """
        factors = [inference.factor(name) for name in cuts]
        for factor in factors:
            self.check(inference, factor)
        summed = {str(factor.name) for factor in factors if factor.reduction == "+"}

        def slice_of(tensor: TensorDims, sums: Iterable[str]) -> Slice | None:
            if tensor.dims is None:
                return None
            index, num = 0, 1
            for name, cut in cuts.items():
                if name in sums and name not in tensor.names():
                    index, num = index * cut.num + cut.index, num * cut.num
            ranges = tuple(inference.range_of(dim, cuts) for dim in tensor.dims)
            return Slice(ranges, (index, num) if num > 1 else None)

        annotation = inference.annotation
        inputs = tuple(
            slice_of(tensor, summed if idx in self.terms else ())
            for idx, tensor in enumerate(annotation.inputs)
        )
        outputs = tuple(slice_of(tensor, summed) for tensor in annotation.outputs)
        changed = {name: cut.length for name, cut in cuts.items() if name in kwargs}
        return OperatorPart(inputs, outputs, {**kwargs, **changed})

    def may_split(self, inference: InferredDimop, factor: Factor) -> bool:
        """Whether ``factor`` can be split in two parts."""
        return self.refusal(inference, factor) is None and inference.length(factor) > 1

    def check(self, inference: InferredDimop, factor: Factor) -> None:
        """Raise AnnotationError where ``factor`` may not be split."""
        if (reason := self.refusal(inference, factor)) is not None:
            raise inference.annotation.error(reason, factor.column)

    def refusal(self, inference: InferredDimop, factor: Factor) -> str | None:
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
                names = [factor.name for factor in dim.factors]
                outer = dim.factors[: names.index(name)] if name in names else ()
                if any(inference.length(factor) != 1 for factor in outer):
                    return (
                        f"{name!r} is not outermost in '{dim}'; only the first identifier of a "
                        "bracket may be split"
                    )
        without = [t for t in annotation.outputs if t.dims is not None and name not in t.names()]
        if factor.reduction == "" and without:
            return (
                f"{name!r} is not in the output '{without[0]}'; an identifier that is summed over "
                f"is written '{name}+', one that must stay whole '{name}^'"
            )
        return self._added_twice(annotation, name, without)

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


# --- lengths ------------------------------------------------------------------------------------


def _all_shapes(annotation: Annotation, shapes: Sequence[Shape | None]) -> list[Shape | None]:
    """One entry an input; those for ``?`` are None."""
    inputs = annotation.inputs
    count = sum(tensor.dims is not None for tensor in inputs)
    if len(shapes) not in (count, len(inputs)):
        raise AnnotationError(
            f"{len(shapes)} shapes given, but {str(annotation)!r} has {count} input "
            f"tensor{'s' * (count != 1)}"
        )
    if len(shapes) == count:
        rest = iter(shapes)
        shapes = [None if tensor.dims is None else next(rest) for tensor in inputs]
    pairs = zip(inputs, shapes, strict=True)
    given = [None if tensor.dims is None else shape for tensor, shape in pairs]
    for idx, (tensor, shape) in enumerate(zip(inputs, given, strict=True)):
        if tensor.dims is not None and shape is None:
            raise annotation.error(f"input {idx} has no shape; expected one", tensor.column)
    return given


def _expand_stars(
    annotation: Annotation, shapes: Sequence[Shape | None]
) -> tuple[Annotation, dict[str, int]]:
    """``*`` written out as fresh identifiers, the same everywhere, and their lengths."""
    taken = annotation.reductions()
    if STAR not in taken:
        return annotation, {}
    sizes = _star_sizes(annotation, shapes)
    fresh = (name for i in range(len(sizes) + len(taken)) if (name := f"_{i}") not in taken)
    names = [next(fresh) for _ in sizes]
    return annotation.with_stars_as(names), dict(zip(names, sizes, strict=True))


def _star_sizes(annotation: Annotation, shapes: Sequence[Shape | None]) -> tuple[int, ...]:
    """The sizes that ``*`` stands for. Raises AnnotationError where tensors do not agree."""
    found: tuple[int, ...] | None = None
    for idx, (tensor, shape) in enumerate(zip(annotation.inputs, shapes, strict=True)):
        dims = tensor.dims or ()
        place = next((i for i, dim in enumerate(dims) if dim.factors[0].name == STAR), None)
        if place is None or shape is None:
            continue
        column, count = dims[place].column, len(shape) - len(dims) + 1
        if count < 0:
            raise annotation.error(
                f"'*' cannot expand: input {idx} has shape {_text(shape)}, expected "
                f"{len(dims) - 1} dimensions or more",
                column,
            )
        sizes = tuple(shape[place : place + count])
        if found is not None and found != sizes:
            raise annotation.error(
                f"'*' cannot expand: it is {_text(found)} before and {_text(sizes)} in input "
                f"{idx}; expected the same",
                column,
            )
        found = sizes
    if found is None:
        column = next(f.column for t in annotation.outputs for f in t.factors() if f.name == STAR)
        raise annotation.error("'*' cannot expand: no input has it; expected it in one", column)
    return found


def _keyword_lengths(annotation: Annotation, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """The lengths that keyword arguments give."""
    lengths = {}
    for name in annotation.reductions().keys() & kwargs.keys():
        value = kwargs[name]
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole) or value < 0:
            raise AnnotationError(f"{name}={value!r} gives the length of {name!r}; expected an int")
        lengths[name] = int(value)
    return lengths


def _match_ranks(annotation: Annotation, shapes: Sequence[Shape | None]) -> None:
    for idx, (tensor, shape) in enumerate(zip(annotation.inputs, shapes, strict=True)):
        if tensor.dims is not None and shape is not None and len(tensor.dims) != len(shape):
            raise annotation.error(
                f"input {idx} has shape {_text(shape)}, of rank {len(shape)}; expected rank "
                f"{len(tensor.dims)} ('{tensor}')",
                tensor.column,
            )


def _solve(annotation: Annotation, shapes: Sequence[Shape | None], lengths: dict[str, int]) -> None:
    """Fill ``lengths`` from the input shapes, until each dimension's product is its size."""
    open_dims = [
        (idx, dim, size)
        for idx, (tensor, shape) in enumerate(zip(annotation.inputs, shapes, strict=True))
        for dim, size in zip(tensor.dims or (), shape or (), strict=True)
    ]
    open_dims.sort(key=lambda item: len(item[1].factors))
    while open_dims:
        rest = [item for item in open_dims if not _solve_dim(annotation, *item, lengths)]
        if len(rest) == len(open_dims):
            idx, dim, size = rest[0]
            unknown = [str(f.name) for f in dim.factors if _known(f, lengths) is None]
            raise annotation.error(
                f"input {idx}: {size} does not tell the lengths of {', '.join(unknown)} in "
                f"'{dim}'; give {' or '.join(f'{name}=' for name in unknown)} as a keyword",
                dim.column,
            )
        open_dims = rest


def _solve_dim(
    annotation: Annotation, idx: int, dim: Dim, size: int, lengths: dict[str, int]
) -> bool:
    """Whether the dimension is settled; its one unknown length is filled in."""
    unknown = {f.name for f in dim.factors if _known(f, lengths) is None}
    known = math.prod(length for f in dim.factors if (length := _known(f, lengths)) is not None)
    if len(unknown) == 1 and len([f for f in dim.factors if f.name in unknown]) == 1:
        if known and size % known == 0:
            (name,) = unknown
            lengths[str(name)] = size // known
            return True
        if not known and size == 0:
            return False
    elif unknown:
        return False
    elif known == size:
        return True
    told = ", ".join(
        f"{f.name} = {length}"
        for f in dim.factors
        if isinstance(f.name, str) and (length := _known(f, lengths)) is not None
    )
    expected = f"a multiple of {known}" if unknown else str(known)
    raise annotation.error(
        f"input {idx}: '{dim}' is {size}; expected {expected}{f' ({told})' * bool(told)}",
        dim.column,
    )


def _known(factor: Factor, lengths: Mapping[str, int]) -> int | None:
    return factor.name if isinstance(factor.name, int) else lengths.get(factor.name)


def _output_shape(inference: InferredDimop, tensor: TensorDims) -> tuple[int, ...] | None:
    if tensor.dims is None:
        return None
    for factor in tensor.factors():
        if _known(factor, inference.lengths) is None:
            raise inference.annotation.error(
                f"no input gives the length of {factor.name!r}; expected it in an input, or "
                f"{factor.name}= as a keyword",
                factor.column,
            )
    return tuple(map(inference.size, tensor.dims))


def _text(shape: Shape) -> str:
    return f"({', '.join(str(size) for size in shape)})"
