"""An annotation held against shapes: the length of each identifier, the shape of each output.

In come an annotation, the shapes of the inputs and keyword arguments; out comes an `Inference`.
What always holds: the factors of each dimension multiply to its size, ``*`` is written out as the
same identifiers everywhere, and every identifier has a length. What does not fit raises
AnnotationError, which points at the column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.errors import AnnotationError
from shardwright.ops.annotation import STAR, Annotation, Dim, Factor, TensorDims

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Inference:
    """An annotation held against shapes.

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


def infer(
    annotation: Annotation, shapes: Sequence[Shape | None], kwargs: Mapping[str, Any]
) -> Inference:
    """Lengths and output shapes; see `Dimop.infer`. Raises AnnotationError."""
    given = _all_shapes(annotation, shapes)
    expanded, lengths = _expand_stars(annotation, given)
    lengths |= _keyword_lengths(expanded, kwargs)
    _match_ranks(expanded, given)
    _solve(expanded, given, lengths)
    inference = Inference(expanded, lengths, ())
    outputs = tuple(_output_shape(inference, tensor) for tensor in expanded.outputs)
    return replace(inference, outputs=outputs)


def _all_shapes(annotation: Annotation, shapes: Sequence[Shape | None]) -> list[Shape | None]:
    """One entry an input; those for ``?`` are None."""
    inputs = annotation.inputs
    tensors = [tensor for tensor in inputs if tensor.dims is not None]
    if len(shapes) == len(inputs):
        pairs = zip(inputs, shapes, strict=True)
        given = [None if tensor.dims is None else shape for tensor, shape in pairs]
    elif len(shapes) == len(tensors):
        rest = iter(shapes)
        given = [None if tensor.dims is None else next(rest) for tensor in inputs]
    else:
        raise AnnotationError(
            f"{len(shapes)} shapes given, but {str(annotation)!r} has {len(tensors)} input "
            f"tensor{'s' * (len(tensors) != 1)}"
        )
    for idx, (tensor, shape) in enumerate(zip(inputs, given, strict=True)):
        if tensor.dims is not None and shape is None:
            raise annotation.error(f"input {idx} has no shape; expected one", tensor.column)
    return given


def _expand_stars(
    annotation: Annotation, shapes: Sequence[Shape | None]
) -> tuple[Annotation, dict[str, int]]:
    """``*`` written out as fresh identifiers, the same everywhere, and their lengths."""
    reduction = annotation.reductions().get(STAR)
    if reduction is None:
        return annotation, {}
    sizes = _star_sizes(annotation, shapes)
    taken = annotation.reductions()
    fresh = (name for i in range(len(sizes) + len(taken)) if (name := f"_{i}") not in taken)
    names = [next(fresh) for _ in sizes]

    def written_out(tensor: TensorDims) -> TensorDims:
        if tensor.dims is None:
            return tensor
        dims: list[Dim] = []
        for dim in tensor.dims:
            star = dim.factors[0]
            if star.name == STAR:
                dims += [Dim((Factor(name, reduction, star.column),)) for name in names]
            else:
                dims.append(dim)
        return TensorDims(tuple(dims), tensor.column)

    expanded = Annotation(
        tuple(map(written_out, annotation.inputs)),
        tuple(map(written_out, annotation.outputs)),
        annotation.text or str(annotation),
    )
    return expanded, dict(zip(names, sizes, strict=True))


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


def _output_shape(inference: Inference, tensor: TensorDims) -> tuple[int, ...] | None:
    if tensor.dims is None:
        return None
    for factor in tensor.factors():
        if _known(factor, inference.lengths) is None:
            raise inference.annotation.error(
                f"no input gives the length of {factor.name!r}; expected it in an input, or "
                f"{factor.name}= as a keyword",
                factor.column,
            )
    return tuple(
        math.prod(inference.length(factor) for factor in dim.factors) for dim in tensor.dims
    )


def _text(shape: Shape) -> str:
    return f"({', '.join(str(size) for size in shape)})"
