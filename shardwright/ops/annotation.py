"""The language of dimension annotations: text to an `Annotation`, and back.

    annotation  side "->" side                      m^ kd+, kd+ n -> m^ n
    side        tensors separated by ","            the left side may be empty: no inputs
    tensor      dimensions separated by " "         "?" stands for what is no tensor,
                                                    "()" for a tensor without dimensions
    dimension   factor, or "(" factors ")"          (h t): one dimension, h outermost
    factor      identifier, number or "*", and a reduction: none, "+" or "^"

Invariant: ``parse(str(annotation)) == annotation``; an identifier has one reduction
everywhere; a number has ``^``; ``*`` stands outside brackets and at most once in a tensor. What
depends on shapes (``*``, lengths, ranks) is `dimop`'s. Every error points at its column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shardwright.errors import AnnotationError

REDUCTIONS = ("", "+", "^")
STAR = "*"

_TOKEN = re.compile(r"\s*(->|[(),]|[^\s(),]*?(?=->)|[^\s(),]+)")
_FACTOR = re.compile(r"(\*|\w+)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Factor:
    """An identifier or a number, and its reduction; a dimension is a product of factors.

    ``column`` counts from 1 in the text that it was read from; 0 where it was not read.
    """

    name: str | int
    reduction: str = ""
    column: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return str(self.name) if isinstance(self.name, int) else f"{self.name}{self.reduction}"


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a tensor: its factors, outermost first."""

    factors: tuple[Factor, ...]

    def __str__(self) -> str:
        text = " ".join(str(factor) for factor in self.factors)
        return text if len(self.factors) == 1 else f"({text})"

    @property
    def column(self) -> int:
        """Where the first factor stands."""
        return self.factors[0].column


@dataclass(frozen=True, slots=True)
class TensorDims:
    """One input or output: its dimensions, or None where it is no tensor."""

    dims: tuple[Dim, ...] | None
    column: int = field(default=0, compare=False)

    def __str__(self) -> str:
        if self.dims is None:
            return "?"
        return " ".join(str(dim) for dim in self.dims) or "()"

    def factors(self) -> Iterator[Factor]:
        """All factors, in order."""
        for dim in self.dims or ():
            yield from dim.factors

    def names(self) -> list[str]:
        """The identifiers, in order, repetitions included; numbers left out."""
        return [factor.name for factor in self.factors() if isinstance(factor.name, str)]


@dataclass(frozen=True, slots=True)
class Annotation:
    """Inputs and outputs of an operator; ``text`` is what error messages point into."""

    inputs: tuple[TensorDims, ...]
    outputs: tuple[TensorDims, ...]
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        inputs = ", ".join(str(tensor) for tensor in self.inputs)
        outputs = ", ".join(str(tensor) for tensor in self.outputs)
        return f"{inputs} -> {outputs}".lstrip()

    def tensors(self) -> tuple[TensorDims, ...]:
        """Inputs, then outputs."""
        return (*self.inputs, *self.outputs)

    def reductions(self) -> dict[str, str]:
        """The reduction of each identifier, in the order in which they first stand."""
        return {
            factor.name: factor.reduction
            for tensor in self.tensors()
            for factor in tensor.factors()
            if isinstance(factor.name, str)
        }

    def with_stars_as(self, names: Sequence[str]) -> Annotation:
        """``*`` written out as these identifiers, the same everywhere."""

        def written_out(tensor: TensorDims) -> TensorDims:
            if tensor.dims is None:
                return tensor
            dims: list[Dim] = []
            for dim in tensor.dims:
                star = dim.factors[0]
                named = (Dim((Factor(name, star.reduction, star.column),)) for name in names)
                dims += named if star.name == STAR else (dim,)
            return TensorDims(tuple(dims), tensor.column)

        inputs, outputs = (tuple(map(written_out, side)) for side in (self.inputs, self.outputs))
        return Annotation(inputs, outputs, self.text or str(self))

    def error(self, message: str, column: int) -> AnnotationError:
        """An error that points at a column of the text, where there is one."""
        return AnnotationError(message, text=self.text or str(self), column=column)


@lru_cache(maxsize=4096)
def parse(text: str) -> Annotation:
    """The annotation that ``text`` writes. Raises AnnotationError with the column."""
    if not isinstance(text, str):
        raise AnnotationError(f"an annotation is a text, not {text!r}")
    return _Parser(text).annotation()


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    column: int


class _Parser:
    """Reads one text from left to right; one method a rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [
            _Token(match[1], match.start(1) + 1) for match in _TOKEN.finditer(text) if match[1]
        ]
        self.tokens.append(_Token("", len(text.rstrip()) + 1))
        self.place = 0
        self.reductions: dict[str, Factor] = {}

    def annotation(self) -> Annotation:
        inputs = () if self.next.text == "->" else self.side()
        if self.next.text != "->":
            raise self.error("expected ',' or '->'")
        self.take()
        outputs = self.side()
        if self.next.text:
            raise self.error("expected ',' or the end; '->' stands once")
        return Annotation(inputs, outputs, self.text)

    def side(self) -> tuple[TensorDims, ...]:
        tensors = [self.tensor()]
        while self.next.text == ",":
            self.take()
            tensors.append(self.tensor())
        return tuple(tensors)

    def tensor(self) -> TensorDims:
        column = self.next.column
        if self.next.text == "?":
            self.take()
            self.expect_end("'?' is no tensor and stands alone")
            return TensorDims(None, column)
        if self.next.text == "(" and self.following.text == ")":
            self.take()
            self.take()
            self.expect_end("'()' is a tensor without dimensions and stands alone")
            return TensorDims((), column)
        dims = []
        while self.next.text not in (",", "->", ""):
            dims.append(self.dim())
        if not dims:
            raise self.error("expected the dimensions of a tensor, '()' or '?'")
        self.check_stars(dims)
        return TensorDims(tuple(dims), column)

    def expect_end(self, message: str) -> None:
        if self.next.text not in (",", "->", ""):
            raise self.error(f"{message}; expected ',', '->' or the end")

    def dim(self) -> Dim:
        if self.next.text == ")":
            raise self.error("this bracket was not opened; expected a dimension")
        if self.next.text != "(":
            return Dim((self.factor(),))
        opening = self.take()
        if opening.column > 1 and self.text[opening.column - 2].isalnum():
            raise self.error("expected a space before '('", opening)
        factors = []
        while self.next.text != ")":
            if self.next.text in (",", "->", ""):
                raise self.error("this bracket is not closed; expected ')'", opening)
            if self.next.text == "(":
                raise self.error("brackets do not nest; expected an identifier or ')'")
            factors.append(self.factor())
            if factors[-1].name == STAR:
                raise self.error("'*' stands outside brackets", self.tokens[self.place - 1])
        closing = self.take()
        if not factors:
            raise self.error("empty dimension; expected identifiers in the brackets", opening)
        if self.next.column == closing.column + 1 and self.next.text not in (",", "->", ")", ""):
            raise self.error(
                "expected a space after ')'; a reduction follows each identifier in the brackets"
            )
        return Dim(tuple(factors))

    def factor(self) -> Factor:
        token = self.take()
        match = _FACTOR.fullmatch(token.text)
        name, reduction = match.groups() if match else ("", token.text)
        if not match and token.text in REDUCTIONS:
            raise self.error("empty dimension; expected an identifier before this", token)
        if not (name == STAR or name.isidentifier() or name.isdecimal()):
            raise self.error("expected an identifier, a number, '*', '?' or '('", token)
        if reduction not in REDUCTIONS:
            where = _Token(reduction, token.column + len(name))
            raise self.error(
                f"unknown reduction {reduction!r}; expected '+', '^' or a space", where
            )
        if name.isdecimal():
            return self.number(int(name), reduction, token)
        factor = Factor(name, reduction, token.column)
        first = self.reductions.setdefault(name, factor)
        if first.reduction != reduction:
            raise self.error(
                f"{name!r} has two reductions: {str(first)!r} at column {first.column} and "
                f"{str(factor)!r} here; expected one",
                token,
            )
        return factor

    def number(self, value: int, reduction: str, token: _Token) -> Factor:
        if reduction == "+":
            where = _Token(reduction, token.column + len(token.text) - 1)
            raise self.error("a number is never split; expected no '+' after it", where)
        return Factor(value, "^", token.column)

    def check_stars(self, dims: list[Dim]) -> None:
        stars = [dim for dim in dims if dim.factors[0].name == STAR]
        if len(stars) > 1:
            raise self.error(
                "a second '*' in one tensor; expected one", _Token(STAR, stars[1].column)
            )

    @property
    def next(self) -> _Token:
        return self.tokens[self.place]

    @property
    def following(self) -> _Token:
        return self.tokens[min(self.place + 1, len(self.tokens) - 1)]

    def take(self) -> _Token:
        self.place += 1
        return self.tokens[self.place - 1]

    def error(self, message: str, token: _Token | None = None) -> AnnotationError:
        token = token or self.next
        found = f"found {token.text!r}" if token.text else "found the end"
        return AnnotationError(f"{found}: {message}", text=self.text, column=token.column)
