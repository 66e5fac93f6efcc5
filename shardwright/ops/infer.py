"""Find an operator's annotation by running it: split inputs, run, put together, compare.

In comes a function of tensors and an example, or a call of an operator; out comes the `Dimop`, or
the catalog `Rule`, of the splits that `search` found. An annotation found this way is true of the
example's shapes; dimensions that did not split are written with ``^``, or as numbers where only an
output has them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwright.errors import AnnotationError
from shardwright.ir.operators import join_call, resolve
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.annotation import Annotation, Dim, Factor, TensorDims
from shardwright.ops.call import Call, Local, Rule, letters
from shardwright.ops.dimop import Dimop
from shardwright.ops.search import Place, Search, Split, replaced

MOST_ELEMENTS = 1 << 20
"""Of all inputs together, for an operator of a graph to be looked into."""


def infer_annotation(fn: Callable[..., Any], *example: Any) -> Dimop:
    """The annotation of a function, by running it on parts of an example.

    ``example`` are the function's arguments, tensors first; sizes that differ from each other
    tell dimensions apart best. A whole number that is split with a dimension (``h`` of a reshape)
    gives the identifier its parameter's name. Raises AnnotationError where the function does not
    run on the example, gives no tensors, or gives other results each time.
    """
    tensors = [item for item in example if isinstance(item, torch.Tensor)]
    rest = {
        name: item
        for name, item in zip(_parameter_names(fn, len(example)), example, strict=True)
        if not isinstance(item, torch.Tensor)
    }
    if any(isinstance(item, torch.Tensor) for item in example[len(tensors) :]):
        raise AnnotationError("an example gives tensors first, then the other arguments")

    def run(inputs: list[torch.Tensor], numbers: Any) -> list[torch.Tensor]:
        made = fn(*inputs, *numbers.values())
        return list(made) if isinstance(made, (list, tuple)) else [made]

    search = Search(run, tensors, rest)
    return dimop_of_splits(search, search.splits())


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names for positional arguments; made up where the function does not tell."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [*names[:count], *(f"arg{i}" for i in range(len(names), count))]


def infer_rule(call: Call) -> Rule | str:
    """The rule of an operator that the catalog lacks, or why none was found."""
    if any(dtype not in _FILLS for dtype in call.dtypes):
        return f"it takes {', '.join(sorted(set(call.dtypes) - _FILLS.keys()))}"
    if sum(math.prod(shape) for shape in call.inputs) > MOST_ELEMENTS:
        return f"its inputs have more than {MOST_ELEMENTS} elements, too many to try it on"
    generator = torch.Generator().manual_seed(0)
    tensors = [
        _FILLS[dtype](shape, generator).to(torch_dtype(dtype))
        for shape, dtype in zip(call.inputs, call.dtypes, strict=True)
    ]
    return discover(call, tensors)


def discover(call: Call, tensors: list[torch.Tensor]) -> Rule | str:
    """The rule of a call by running it on these inputs, or why none was found."""
    overload = resolve(call.op)

    def run(inputs: list[torch.Tensor], attrs: Any) -> list[torch.Tensor]:
        args, kwargs = join_call(overload, inputs, attrs, torch.device("cpu"))
        made = overload(*args, **kwargs)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    try:
        search = Search(run, tensors, dict(call.attrs))
    except AnnotationError as error:
        return str(error)
    return rule_of_splits(search, search.splits())


def _floats(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator)


def _small(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, tuple(shape), generator=generator)


_FILLS: dict[str, Callable[[Sequence[int], torch.Generator], torch.Tensor]] = {
    **dict.fromkeys(("f64", "f32", "f16", "bf16"), _floats),
    **dict.fromkeys(("bool", "i64", "i32", "i16", "i8", "u8"), _small),
}


# --- what was found, as an annotation -------------------------------------------------------------


def dimop_of_splits(search: Search, splits: Sequence[Split]) -> Dimop:
    """The splits that an annotation can say: those that divide no number, or a parameter."""
    said = [
        split
        for split in splits
        if split.number is None or (len(split.number[0]) == 1 and split.number[1] == 1)
    ]
    given = [str(split.number[0][0]) for split in said if split.number]
    free = (name for name in letters(len(said) + len(given)) if name not in given)
    names = [str(split.number[0][0]) if split.number else next(free) for split in said]
    terms = frozenset(i for split in said for i in split.terms)
    shared = frozenset(range(len(search.tensors))) - terms
    return Dimop(written(search, dict(zip(names, said, strict=True))), shared, terms)


def rule_of_splits(search: Search, splits: Sequence[Split]) -> Rule:
    """The splits as a rule of the catalog."""
    named = dict(zip(letters(len(splits)), splits, strict=True))
    numbers = {name: split.number for name, split in named.items() if split.number is not None}

    def attrs(local: Local) -> dict[str, Any]:
        changed = dict(local.call.attrs)
        for name, (path, unit) in numbers.items():
            changed = replaced(changed, path, local.lengths[name] * unit)
        return changed

    return Rule(
        str(written(search, named)),
        lengths={name: split.length for name, split in named.items()},
        terms=frozenset(i for split in splits for i in split.terms),
        attrs=attrs if numbers else None,
    )


def written(search: Search, named: dict[str, Split]) -> Annotation:
    """The annotation of named splits."""
    fresh = (name for name in letters(1000) if name not in named)
    kept: dict[int, str] = {}

    def kept_whole(size: int) -> Factor:
        if size == 1:
            return Factor(1, "^")
        if size not in kept:
            kept[size] = next(fresh)
        return Factor(kept[size], "^")

    def kept_or_number(size: int) -> Factor:
        return kept_whole(size) if size in kept else Factor(size, "^")

    inputs = [
        dims_of(tensor.shape, {n: s.inputs.get(i) for n, s in named.items()}, named, kept_whole)
        for i, tensor in enumerate(search.tensors)
    ]
    outputs = [
        dims_of(tensor.shape, {n: s.outputs[i] for n, s in named.items()}, named, kept_or_number)
        for i, tensor in enumerate(search.whole)
    ]
    return Annotation(tuple(inputs), tuple(outputs))


def dims_of(
    shape: Sequence[int],
    places: dict[str, Place | None],
    named: dict[str, Split],
    whole: Callable[[int], Factor],
) -> TensorDims:
    """A tensor's dimensions, given where each split cuts it and what is written elsewhere."""
    carried = {place.dim: (name, place.unit) for name, place in places.items() if place}

    def factors(dim: int, size: int) -> Iterator[Factor]:
        if dim not in carried:
            yield whole(size)
            return
        name, unit = carried[dim]
        yield Factor(name, "+" if None in named[name].outputs else "")
        if unit != 1:
            yield Factor(unit, "^")

    return TensorDims(tuple(Dim(tuple(factors(*item))) for item in enumerate(shape)))
