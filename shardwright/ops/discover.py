"""Find an operator's annotation by running it: split inputs, run, put together, compare.

Input: a function of tensors and an example, or a call of an operator; output: the `Dimop`, or
the `Rule`, of the splits that held. It is true of the example's shapes; dimensions that did not
split are written with ``^``, or as numbers where only an output has them.

A dimension is split together with dimensions of other inputs, the fewest that will do, and with at
most one whole number among the other arguments (``view``'s sizes, a convolution's groups). Where
lengths differ, what is split is their common divisor: ``(a 16) b -> a 16 b``. Each split was run in
several ways, even and uneven, and gave the whole.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shardwright.errors import AnnotationError
from shardwright.ir.operators import join_call, resolve
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.annotation import Annotation, Dim, Factor, TensorDims
from shardwright.ops.call import CatalogCall, Local, Rule, letters
from shardwright.ops.dimop import Dimop
from shardwright.ops.trial import same

MOST_ELEMENTS = 1 << 20
"""Of all inputs together, for an operator of a graph to be looked into."""
MOST_RUNS = 4000
"""Of the operator, in one search; what is not found by then stays whole."""

Run = Callable[[list[torch.Tensor], Any], list[torch.Tensor]]
Path = tuple[int | str, ...]
"""Where a whole number stands among the arguments that are no tensors."""
Number = tuple[Path, int]


def infer_annotation(fn: Callable[..., Any], *example: Any) -> Dimop:
    """Infer the annotation of a function by running it on slices of an example.

    ``example`` holds the function's arguments, tensors first. Sizes that differ from each other
    distinguish dimensions best. An integer argument that is split together with a dimension (``h``
    of a reshape) gives the identifier its name. Raises AnnotationError if the function does not run
    on the example, returns no tensors, or returns other results each time.
    """
    tensors = [item for item in example if isinstance(item, torch.Tensor)]
    rest = {
        name: item
        for name, item in zip(_parameter_names(fn, len(example)), example, strict=True)
        if not isinstance(item, torch.Tensor)
    }
    if any(isinstance(item, torch.Tensor) for item in example[len(tensors) :]):
        raise AnnotationError("an example gives tensors first, then the other arguments")
    search = Search(lambda inputs, numbers: fn(*inputs, *numbers.values()), tensors, rest)
    splits = [s for s in search.splits() if s.number is None or _is_parameter(s.number)]
    given = [str(split.number[0][0]) for split in splits if split.number]
    free = (name for name in letters(len(splits) + len(given)) if name not in given)
    names = [str(split.number[0][0]) if split.number else next(free) for split in splits]
    terms = frozenset(i for split in splits for i in split.terms)
    annotation = search.annotation(dict(zip(names, splits, strict=True)))
    return Dimop(annotation, frozenset(range(len(tensors))) - terms, terms)


def _is_parameter(number: Number) -> bool:
    """Whether an annotation can say what number is split: one that is a parameter, by ones."""
    path, unit = number
    return len(path) == 1 and unit == 1


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names for positional arguments; made up where the function does not tell."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [*names[:count], *(f"arg{i}" for i in range(len(names), count))]


def infer_rule(call: CatalogCall) -> Rule | str:
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


_FILLS: dict[str, Callable[[Sequence[int], torch.Generator], torch.Tensor]] = {
    **dict.fromkeys(
        ("f64", "f32", "f16", "bf16"),
        lambda shape, generator: torch.randn(tuple(shape), generator=generator),
    ),
    **dict.fromkeys(
        ("bool", "i64", "i32", "i16", "i8", "u8"),
        lambda shape, generator: torch.randint(0, 2, tuple(shape), generator=generator),
    ),
}


def discover(call: CatalogCall, tensors: list[torch.Tensor]) -> Rule | str:
    """The rule of a call by running it on these inputs, or why none was found."""
    overload = resolve(call.op)

    def run(inputs: list[torch.Tensor], attrs: Any) -> Any:
        args, kwargs = join_call(overload, inputs, attrs, torch.device("cpu"))
        return overload(*args, **kwargs)

    try:
        search = Search(run, tensors, dict(call.attrs))
    except AnnotationError as error:
        return str(error)
    splits = search.splits()
    named = dict(zip(letters(len(splits)), splits, strict=True))
    numbers = {name: split.number for name, split in named.items() if split.number is not None}

    def attrs(local: Local) -> dict[str, Any]:
        changed: Any = dict(local.call.attrs)
        for name, (path, unit) in numbers.items():
            changed = _replaced(changed, path, local.lengths[name] * unit)
        return dict(changed)

    return Rule(
        str(search.annotation(named)),
        lengths={name: split.length for name, split in named.items()},
        terms=frozenset(i for split in splits for i in split.terms),
        attrs=attrs if numbers else None,
    )


@dataclass(frozen=True, slots=True)
class SplitDim:
    """A dimension of an input or output that is split in multiples of ``unit``."""

    dim: int
    unit: int


@dataclass(frozen=True, slots=True)
class FoundSplit:
    """One way to split that held: ``length`` units, carried by these dimensions.

    inputs
        By index; inputs that are left out are given whole, or to one part if in ``terms``.
    number
        The argument that is divided along with them, and its value for one unit.
    terms
        Inputs that only the first part adds.
    outputs
        A dimension each; None where the parts' outputs are added.
    """

    length: int
    inputs: dict[int, SplitDim]
    number: Number | None = None
    terms: frozenset[int] = frozenset()
    outputs: tuple[SplitDim | None, ...] = ()


@dataclass
class Search:
    """The search on one example: what the whole gives, and how often the operator was run."""

    function: Callable[[list[torch.Tensor], Any], Any]
    tensors: list[torch.Tensor]
    rest: dict[str, Any]
    whole: list[torch.Tensor] = field(default_factory=list)
    has_meta: bool = False
    """Whether it runs on the meta device, where it is tried first: parts that do not fit are
    refused there, while a kernel that does not look at sizes would write past the end of one."""
    runs: int = 0

    def __post_init__(self) -> None:
        try:
            self.whole, again = (self.run(self._copies(), self.rest) for _ in range(2))
        except Exception as error:  # whatever a user's function raises
            raise AnnotationError(
                f"it does not run on the example: {type(error).__name__}: {error}"
            ) from error
        if not self.whole or not all(isinstance(item, torch.Tensor) for item in self.whole):
            raise AnnotationError("it gives something else than tensors")
        if not all(same(one, other) for one, other in zip(self.whole, again, strict=True)):
            raise AnnotationError("it gives other results each time, so parts would too")
        self.has_meta = self._runs_on_meta()

    def run(self, inputs: list[torch.Tensor], rest: Any) -> list[torch.Tensor]:
        """What the function gives, as a list."""
        made = self.function(inputs, rest)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def _runs_on_meta(self) -> bool:
        try:
            made = self.run([tensor.to("meta") for tensor in self.tensors], self.rest)
        except Exception:  # whatever an operator raises that has no such kernel
            return False
        return [tensor.shape for tensor in made] == [tensor.shape for tensor in self.whole]

    def _copies(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors]

    # --- the search -----------------------------------------------------------------------------

    def splits(self) -> list[FoundSplit]:
        """What splits, each dimension of an input in at most one of them."""
        found: list[FoundSplit] = []
        numbers = list(_whole_numbers(self.rest))
        for idx, tensor in enumerate(self.tensors):
            for dim, size in enumerate(tensor.shape):
                taken = {(i, place.dim) for split in found for i, place in split.inputs.items()}
                if size > 1 and (idx, dim) not in taken:
                    split = self._split_of(idx, dim, taken, numbers)
                    found += [split] if split else []
        for path, value in numbers:
            if not any(split.number and split.number[0] == path for split in found):
                split = self._try(FoundSplit(value, {}, (path, 1)))
                found += [split] if split else []
        return found

    def _split_of(
        self, idx: int, dim: int, taken: set[tuple[int, int]], numbers: list[Number]
    ) -> FoundSplit | None:
        """The split of one dimension, with the fewest others that it takes."""
        for partners in self._partners(idx, dim, taken):
            dims = {idx: dim, **partners}
            lengths = {i: self.tensors[i].shape[d] for i, d in dims.items()}
            common = math.gcd(*lengths.values())
            for number in (None, *((p, v) for p, v in numbers if math.gcd(v, common) > 1)):
                for length in self._lengths(common, number):
                    places = {i: SplitDim(d, lengths[i] // length) for i, d in dims.items()}
                    split = self._with_terms(length, places, number)
                    if split is not None or self.runs > MOST_RUNS:
                        return split
        return None

    def _partners(
        self, idx: int, dim: int, taken: set[tuple[int, int]]
    ) -> Iterator[dict[int, int]]:
        """Dimensions of other inputs to split along, the likeliest first."""
        size, rank = self.tensors[idx].shape[dim], self.tensors[idx].dim()
        options: dict[int, list[int]] = {}
        for other, tensor in enumerate(self.tensors):
            if other != idx:
                dims = [
                    d
                    for d, s in enumerate(tensor.shape)
                    if (other, d) not in taken and math.gcd(s, size) > 1
                ]
                options[other] = sorted(dims, key=lambda d: tensor.shape[d] != size)
        yield {}
        for shift in (0, 1):
            alike = {}
            for other, dims in options.items():
                place = dim + shift * (self.tensors[other].dim() - rank)
                if place in dims and self.tensors[other].shape[place] == size:
                    alike[other] = place
            if alike:
                yield alike
        every = [other for other, dims in options.items() if dims]
        for count in range(1, len(every) + 1):
            for others in itertools.combinations(every, count):
                for chosen in itertools.product(*(options[other] for other in others)):
                    yield dict(zip(others, chosen, strict=True))

    def _lengths(self, common: int, number: Number | None) -> list[int]:
        """How many units there may be: all, or as many as an output or the number divides."""
        if number is not None:
            common = math.gcd(common, number[1])
        outputs = {math.gcd(common, n) for made in self.whole for n in made.shape}
        return [n for n in sorted({common} | outputs, reverse=True) if n > 1]

    def _with_terms(
        self, length: int, places: dict[int, SplitDim], number: Number | None
    ) -> FoundSplit | None:
        """The split with every input that lacks it whole, or else with some as terms."""
        if number is not None:
            path, value = number
            if value % length:
                return None
            return self._try(FoundSplit(length, places, (path, value // length)))
        split = self._try(FoundSplit(length, places))
        if split is not None or len(self.tensors) == 1:
            return split
        for i, tensor in enumerate(self.tensors):
            if i not in places and tensor.is_floating_point():
                split = self._try(FoundSplit(length, places, terms=frozenset({i})))
                if split is not None:
                    return split if None in split.outputs else None
        return None

    # --- one try --------------------------------------------------------------------------------

    def _try(self, split: FoundSplit) -> FoundSplit | None:
        """The split with its outputs, if it holds for even and uneven parts."""
        found = None
        for borders in _borders(split.length):
            outputs = self._outputs_of_parts(borders, split)
            if outputs is None or found not in (None, outputs):
                return None
            found = outputs
        assert found is not None
        return FoundSplit(split.length, split.inputs, split.number, split.terms, found)

    def _outputs_of_parts(
        self, borders: Sequence[int], split: FoundSplit
    ) -> tuple[SplitDim | None, ...] | None:
        """How the parts' outputs make the whole's; None where they do not."""
        made = []
        for start, end in itertools.pairwise(borders):
            inputs = self._copies()
            for i, place in split.inputs.items():
                size = (end - start) * place.unit
                inputs[i] = inputs[i].narrow(place.dim, start * place.unit, size).clone()
            if start > 0:
                inputs = [
                    torch.zeros_like(x) if i in split.terms else x for i, x in enumerate(inputs)
                ]
            rest: Any = self.rest
            if split.number is not None:
                path, unit = split.number
                rest = _replaced(rest, path, (end - start) * unit)
            self.runs += 1
            try:
                if self.has_meta:
                    self.run([tensor.to("meta") for tensor in inputs], rest)
                made.append(self.run(inputs, rest))
            except Exception:  # whatever an operator raises on parts that do not fit
                return None
        if any(len(outputs) != len(self.whole) for outputs in made):
            return None
        found: list[SplitDim | None] = []
        for index, whole in enumerate(self.whole):
            how = _put_together([outputs[index] for outputs in made], whole, split.length)
            if how is None:
                return None
            found.append(None if how == "added" else how)
        return tuple(found)

    # --- what was found, as an annotation ---------------------------------------------------------

    def annotation(self, named: Mapping[str, FoundSplit]) -> Annotation:
        """The annotation of named splits."""
        fresh = (name for name in letters(1000) if name not in named)
        kept: dict[int, str] = {}

        def whole_of_input(size: int) -> Factor:
            if size == 1:
                return Factor(1, "^")
            if size not in kept:
                kept[size] = next(fresh)
            return Factor(kept[size], "^")

        def whole_of_output(size: int) -> Factor:
            return whole_of_input(size) if size in kept else Factor(size, "^")

        inputs = [
            _dims_of(
                tensor.shape, {n: s.inputs.get(i) for n, s in named.items()}, named, whole_of_input
            )
            for i, tensor in enumerate(self.tensors)
        ]
        outputs = [
            _dims_of(
                tensor.shape, {n: s.outputs[i] for n, s in named.items()}, named, whole_of_output
            )
            for i, tensor in enumerate(self.whole)
        ]
        return Annotation(tuple(inputs), tuple(outputs))


def _dims_of(
    shape: Sequence[int],
    places: Mapping[str, SplitDim | None],
    named: Mapping[str, FoundSplit],
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


def _borders(length: int) -> list[tuple[int, ...]]:
    """Ways to cut: in the middle, after the first, and in three."""
    ways: set[tuple[int, ...]] = {(0, (length + 1) // 2, length), (0, 1, length)}
    if length > 2:
        ways.add((0, 1, length - 1, length))
    return sorted(ways, reverse=True)


def _put_together(
    pieces: Sequence[torch.Tensor], whole: torch.Tensor, length: int
) -> SplitDim | Literal["added"] | None:
    """Where pieces are joined to the whole, or that they are added; None where neither makes it."""
    if any(piece.dim() != whole.dim() or piece.dtype != whole.dtype for piece in pieces):
        return None
    for dim, size in enumerate(whole.shape):
        sizes = [piece.shape[dim] for piece in pieces]
        if sum(sizes) == size and size % length == 0:
            try:
                joined = torch.cat(list(pieces), dim)
            except RuntimeError:  # they differ in another dimension
                continue
            if same(joined, whole):
                return SplitDim(dim, size // length)
    alike = all(piece.shape == whole.shape for piece in pieces) and whole.dtype != torch.bool
    return "added" if alike and same(sum(pieces[1:], pieces[0]), whole) else None


def _whole_numbers(value: Any, path: Path = ()) -> Iterator[Number]:
    """The whole numbers from 2 up among arguments, and where they stand."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _whole_numbers(item, (*path, key))
    elif type(value) is int and value > 1:
        yield path, value


def _replaced(value: Any, path: Path, number: int) -> Any:
    """The arguments with another number at a place."""
    if not path:
        return number
    first, *rest = path
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    changed[first] = _replaced(value[first], tuple(rest), number)
    return changed
