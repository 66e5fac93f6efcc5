"""Classes that differ in constants alone as one class, whose constructor takes these.

Comes in: the classes of a file, each after those that it uses. Goes out: the same or fewer, in an
order in which that holds. What always holds: a module that was made of one of the old classes does
the same, with tensors under the same names, made of its new one with the arguments that it gets.

    class Up:                                     class Up:
        def __init__(self):                           def __init__(self, out_features: int):
            self.up = nn.Linear(64, 128)                  self.up = nn.Linear(64, out_features)
    class Up2:                             ->
        def __init__(self):
            self.up = nn.Linear(64, 256)
    Up(), Up2()                                   Up(128), Up(256)

Inner classes are merged before outer ones, which then differ in what they give them. Classes that
would need too many arguments stay apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwright.codegenerate.writing.arguments import (
    Member,
    arguments,
    differences,
    with_arguments,
)
from shardwright.codegenerate.writing.classes import ClassText, Defined
from shardwright.codegenerate.writing.constants import pattern
from shardwright.codegenerate.writing.names import ClassNames
from shardwright.codegenerate.writing.parameters import Parameter, Signature, layer_signature
from shardwright.codegenerate.writing.source_text import Edit, SourceText

MOST_ARGUMENTS = 6
"""Differences that a reader can still follow."""


def merged(classes: Sequence[Defined], reserved: Sequence[str] = ()) -> list[Defined]:
    """The classes without those that others can stand for; ``reserved`` are no names for them."""
    merging = _Merging(classes)
    for level in _levels(classes):
        merging.merge(level)
    return _named([merging.made[place] for place in sorted(merging.made)], reserved)


class _Maker(NamedTuple):
    """What stands for a class: another, and what that is given."""

    name: str
    arguments: tuple[str, ...] = ()


@dataclass
class _Merging:
    """Merges the classes of one level after another.

    made
        The new classes by the place of the first that each stands for.
    makers
        By the names of old classes.
    signatures
        Of the new classes' constructors.
    """

    classes: Sequence[Defined]
    made: dict[int, Defined] = field(default_factory=dict)
    makers: dict[str, _Maker] = field(default_factory=dict)
    signatures: dict[str, Signature] = field(default_factory=dict)

    def merge(self, level: Sequence[int]) -> None:
        """Merge classes that use none of one another."""
        groups: dict[Hashable, list[Member]] = {}
        for place in level:
            one = self.classes[place]
            text = _rewritten(one.text, self.makers)
            self.made[place] = replace(one, text=text)
            if not one.is_own:
                member = self._member(place, one.name, text)
                groups.setdefault(member.key, []).append(member)
        for members in groups.values():
            for cluster in _clusters(members):
                self._replace(cluster)

    def _member(self, place: int, name: str, text: ClassText) -> Member:
        init, forward = text.parts
        patterns = pattern(init, self._signature), pattern(forward, self._signature)
        return Member(place, name, text, (init, forward), patterns)

    def _signature(self, name: str) -> Signature | None:
        return self.signatures.get(name) or layer_signature(name)

    def _replace(self, cluster: Sequence[Member]) -> None:
        """Put one class in the place of several."""
        first, *others = cluster
        new = arguments(cluster)
        self.made[first.place] = Defined(first.name, with_arguments(first, new))
        for other in others:
            del self.made[other.place]
        old = (Parameter(text.partition(":")[0]) for text in first.text.parameters)
        added = (Parameter(argument.name, argument.default) for argument in new)
        self.signatures[first.name] = (*old, *added)
        for number, member in enumerate(cluster):
            given = tuple(text for argument in new for text in argument.given(number))
            self.makers[member.name] = _Maker(first.name, given)


def _clusters(members: Sequence[Member]) -> list[list[Member]]:
    """Classes of one pattern by those that can be one."""
    clusters: list[list[Member]] = []
    for member in members:
        fits = (each for each in clusters if len(differences([*each, member])) <= MOST_ARGUMENTS)
        if (home := next(fits, None)) is not None:
            home.append(member)
        else:
            clusters.append([member])
    return clusters


# --- names of classes in classes ------------------------------------------------------------------


def _levels(classes: Sequence[Defined]) -> list[list[int]]:
    """The places of classes that use none, of those that use these alone, and so on."""
    depth: dict[str, int] = {}
    levels: list[list[int]] = []
    for place, one in enumerate(classes):
        used = {found.name.id for part in one.text.parts for found in part.references(depth)}
        own = max((depth[name] + 1 for name in used), default=0)
        depth[one.name] = own
        if own == len(levels):
            levels.append([])
        levels[own].append(place)
    return levels


def _rewritten(text: ClassText, makers: Mapping[str, _Maker]) -> ClassText:
    """A class that makes new classes instead of old ones."""
    init, forward = (_part_rewritten(part, makers) for part in text.parts)
    return replace(text, init=init or text.init, forward=forward or text.forward)


def _part_rewritten(source: SourceText, makers: Mapping[str, _Maker]) -> tuple[str, ...]:
    """The lines of a part that names other classes; nothing where it names none."""
    edits: list[Edit] = []
    for name, call in source.references(makers):
        maker = makers[name.id]
        edits.append(source.renamed(name, maker.name))
        if call is not None and maker.arguments:
            edits.append(source.with_arguments(call, maker.arguments))
    return tuple(source.replaced(edits).split("\n")) if edits else ()


def _named(classes: Sequence[Defined], reserved: Sequence[str]) -> list[Defined]:
    """The classes under names that are numbered without gaps."""
    names = ClassNames(reserved)
    new = {one.name: one.name if one.is_own else names.take(one.text.stem) for one in classes}
    makers = {old: _Maker(name) for old, name in new.items() if old != name}
    return [replace(one, name=new[one.name], text=_rewritten(one.text, makers)) for one in classes]
