"""The search behind discovery: which dimensions of an operator's inputs split together.

In comes a function of tensors and one call of it; out come `Split`s, each of which was run in
several ways, even and uneven, and gave the whole. A dimension is split together with dimensions of
other inputs, the fewest that will do, and with at most one whole number among the other arguments
(``view``'s sizes, a convolution's groups). Where lengths differ, what is split is their common
divisor: ``(a 16) b -> a 16 b``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shardwright.errors import AnnotationError
from shardwright.ops.trial import same

MOST_RUNS = 4000
"""Of the operator, in one search; what is not found by then stays whole."""

Path = tuple[int | str, ...]
"""Where a whole number stands among the arguments that are no tensors."""
Run = Callable[[list[torch.Tensor], Any], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Place:
    """A dimension of an input or output that is split in multiples of ``unit``."""

    dim: int
    unit: int


@dataclass(frozen=True, slots=True)
class Split:
    """One way to split that held: ``length`` units, carried by these dimensions.

    inputs
        By index; inputs that are left out are given whole, or to one part if in ``terms``.
    outputs
        A place each; None where the parts' outputs are added.
    number
        The argument that is divided along with them, and its value for one unit.
    """

    length: int
    inputs: dict[int, Place]
    outputs: tuple[Place | None, ...]
    terms: frozenset[int] = frozenset()
    number: tuple[Path, int] | None = None


@dataclass
class Search:
    """The search on one example: what the whole gives, and what has been tried."""

    run: Run
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

    def _runs_on_meta(self) -> bool:
        try:
            made = self.run([tensor.to("meta") for tensor in self.tensors], self.rest)
        except Exception:  # whatever an operator raises that has no such kernel
            return False
        return [tensor.shape for tensor in made] == [tensor.shape for tensor in self.whole]

    def _copies(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors]

    # --- the search -----------------------------------------------------------------------------

    def splits(self) -> list[Split]:
        """What splits, each dimension of an input in at most one of them."""
        found: list[Split] = []
        numbers = list(_whole_numbers(self.rest))
        for idx, tensor in enumerate(self.tensors):
            for dim, size in enumerate(tensor.shape):
                taken = {(i, place.dim) for split in found for i, place in split.inputs.items()}
                if size > 1 and (idx, dim) not in taken:
                    split = self._split_of(idx, dim, taken, numbers)
                    found += [split] if split else []
        for path, value in numbers:
            if not any(split.number and split.number[0] == path for split in found):
                split = self._try(value, {}, (path, 1), frozenset())
                found += [split] if split else []
        return found

    def _split_of(
        self, idx: int, dim: int, taken: set[tuple[int, int]], numbers: list[tuple[Path, int]]
    ) -> Split | None:
        """The split of one dimension, with the fewest others that it takes."""
        size = self.tensors[idx].shape[dim]
        for partners in self._partners(idx, dim, taken):
            dims = {idx: dim, **partners}
            lengths = {i: self.tensors[i].shape[d] for i, d in dims.items()}
            common = math.gcd(*lengths.values())
            for number in (None, *((p, v) for p, v in numbers if math.gcd(v, common) > 1)):
                for length in self._lengths(common, size, number):
                    places = {i: Place(d, lengths[i] // length) for i, d in dims.items()}
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

    def _lengths(self, common: int, size: int, number: tuple[Path, int] | None) -> list[int]:
        """How many units there may be: all, or as many as an output or the number divides."""
        if number is not None:
            common = math.gcd(common, number[1])
        outputs = {math.gcd(common, n) for made in self.whole for n in made.shape}
        return [n for n in sorted({common} | outputs, reverse=True) if n > 1]

    def _with_terms(
        self, length: int, places: dict[int, Place], number: tuple[Path, int] | None
    ) -> Split | None:
        """The split with every input that lacks it whole, or else with some as terms."""
        scaled = None if number is None else (number[0], number[1] // length)
        if number is not None and number[1] % length:
            return None
        split = self._try(length, places, scaled, frozenset())
        if split is not None or number is not None:
            return split
        rest = [
            i
            for i, tensor in enumerate(self.tensors)
            if i not in places and tensor.is_floating_point()
        ]
        for terms in [frozenset({i}) for i in rest] if len(self.tensors) > 1 else []:
            split = self._try(length, places, scaled, terms)
            if split is not None:
                return split if None in split.outputs else None
        return None

    # --- one try --------------------------------------------------------------------------------

    def _try(
        self,
        length: int,
        places: dict[int, Place],
        number: tuple[Path, int] | None,
        terms: frozenset[int],
    ) -> Split | None:
        """The split, if it holds for even and uneven parts."""
        outputs: tuple[Place | None, ...] | None = None
        for borders in _borders(length):
            found = self._outputs_of_parts(borders, length, places, number, terms)
            if found is None or outputs not in (None, found):
                return None
            outputs = found
        assert outputs is not None
        return Split(length, places, outputs, terms, number)

    def _outputs_of_parts(
        self,
        borders: Sequence[int],
        length: int,
        places: dict[int, Place],
        number: tuple[Path, int] | None,
        terms: frozenset[int],
    ) -> tuple[Place | None, ...] | None:
        """How the parts' outputs make the whole's; None where they do not."""
        made = []
        for start, end in itertools.pairwise(borders):
            inputs = self._copies()
            for i, place in places.items():
                size = (end - start) * place.unit
                inputs[i] = inputs[i].narrow(place.dim, start * place.unit, size).clone()
            if start > 0:
                inputs = [torch.zeros_like(x) if i in terms else x for i, x in enumerate(inputs)]
            rest = self.rest
            if number is not None:
                rest = replaced(rest, number[0], (end - start) * number[1])
            self.runs += 1
            try:
                if self.has_meta:
                    self.run([tensor.to("meta") for tensor in inputs], rest)
                made.append(self.run(inputs, rest))
            except Exception:  # whatever an operator raises on parts that do not fit
                return None
        if any(len(outputs) != len(self.whole) for outputs in made):
            return None
        found: list[Place | None] = []
        for index, whole in enumerate(self.whole):
            how = _put_together([outputs[index] for outputs in made], whole, length)
            if how is None:
                return None
            found.append(None if how == "added" else how)
        return tuple(found)


def _borders(length: int) -> list[tuple[int, ...]]:
    """Ways to cut: in the middle, after the first, and in three."""
    ways: set[tuple[int, ...]] = {(0, (length + 1) // 2, length), (0, 1, length)}
    if length > 2:
        ways.add((0, 1, length - 1, length))
    return sorted(ways, reverse=True)


def _put_together(
    pieces: Sequence[torch.Tensor], whole: torch.Tensor, length: int
) -> Place | Literal["added"] | None:
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
                return Place(dim, size // length)
    alike = all(piece.shape == whole.shape for piece in pieces) and whole.dtype != torch.bool
    return "added" if alike and same(sum(pieces[1:], pieces[0]), whole) else None


def _whole_numbers(value: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """The whole numbers from 2 up among arguments, and where they stand."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _whole_numbers(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _whole_numbers(item, (*path, index))
    elif type(value) is int and value > 1:
        yield path, value


def replaced(value: Any, path: Path, number: int) -> Any:
    """The arguments with another number at a place."""
    if not path:
        return number
    first, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {k: replaced(v, rest, number) if k == first else v for k, v in value.items()}
    return [replaced(v, rest, number) if i == first else v for i, v in enumerate(value)]
