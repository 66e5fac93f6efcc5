"""One step of a forward: what it reads and makes, and how it is written.

A step is an operator's call, a call of a module, or a loop over modules. Its expression is written
when names, or the expressions nested in it, are known. What always holds: steps are in an order in
which they can run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.ir.values import Source

Write = Callable[[Mapping[int, str]], str]
"""From what is read, by value id, to the expression."""


@dataclass(frozen=True, slots=True)
class Step:
    """A statement, or a part of one.

    reads
        Value ids, one an operand, in the order of the text.
    makes
        What the expression's value is: one value, or a tuple with None where nobody needs it.
    is_tuple
        Whether the expression's value is a tuple.
    stays
        Whether it is a statement of its own, in its place: it draws random numbers.
    typed
        Whether a type checker knows that it gives tensors, if what it reads are.
    """

    reads: tuple[int, ...]
    makes: tuple[int | None, ...]
    write: Write
    is_tuple: bool = False
    stays: bool = False
    typed: Callable[[str], bool] = lambda expression: True
    source: Source | None = None

    @property
    def made(self) -> tuple[int, ...]:
        """The values that somebody needs."""
        return tuple(value_id for value_id in self.makes if value_id is not None)

    def expression(self, operands: Mapping[int, str]) -> str:
        """The text; of a tuple of which one part is needed, that part."""
        written = self.write(operands)
        if self.is_tuple and len(self.made) == 1:
            place = self.makes.index(self.made[0])
            return f"{written}[{place}]"
        return written


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module with a forward, before it is a step.

    callee
        How its caller reaches it: ``self.h["0"]``.
    container, key
        The modules that stand beside it, ``self.h``, where it is one of several; and its name.
    constructor
        What makes it.
    """

    callee: str
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    constructor: str
    container: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of modules in a chain: each reads what the one before it gives, and the same besides.

    over
        What is iterated over, ``self.h.values()``; ``item`` the name of one of them.
    carried
        Which argument is the result of the call before.
    first, last
        The values that enter and leave.
    """

    over: str
    item: str
    callee: str
    arguments: tuple[int, ...]
    carried: int
    last: int

    @property
    def first(self) -> int:
        """The value that enters."""
        return self.arguments[self.carried]

    @property
    def reads(self) -> tuple[int, ...]:
        """Value ids, one an argument."""
        return self.arguments

    @property
    def made(self) -> tuple[int, ...]:
        """The value that leaves."""
        return (self.last,)


@dataclass(frozen=True, slots=True)
class Work:
    """What a forward does.

    updates
        Buffers, as they are reached, and the values that replace their contents in the end.
    stored
        How each stored value is reached that is no argument.
    names
        Wanted names by value id.
    pinned
        Values whose names stay theirs to the end.
    large
        Values that are worth deleting.
    taken
        Names that no value gets.
    verbose
        Whether each step is a statement of its own.
    """

    steps: Sequence[Step | Loop]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    updates: Sequence[tuple[str, int]]
    stored: Mapping[int, str]
    names: Mapping[int, str]
    pinned: frozenset[int] = frozenset()
    large: frozenset[int] = frozenset()
    taken: frozenset[str] = frozenset()
    verbose: bool = False
