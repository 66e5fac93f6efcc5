"""The arguments of a class that stands for several: what these differ in.

Comes in: classes of one pattern. Goes out: the arguments that the first needs to be any of them,
and the class that has these. What always holds: constants that are equal in each class are one
argument, unless they are a stride and a dilation, say, which are equal by chance; with the values
of a class given, the new class is that one.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.codegenerate.writing.argument_names import argument_names
from shardwright.codegenerate.writing.classes import ClassText
from shardwright.codegenerate.writing.constants import Constant, Pattern, Use
from shardwright.codegenerate.writing.source_text import Edit, SourceText


@dataclass(frozen=True, slots=True)
class Member:
    """A class, one of several: its constructor and its forward, and the patterns of these."""

    place: int
    name: str
    text: ClassText
    parts: tuple[SourceText, SourceText]
    patterns: tuple[Pattern, Pattern]

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Those of the constructor, and behind them those of the forward."""
        return tuple(constant for one in self.patterns for constant in one.constants)

    @property
    def inside_constructor(self) -> int:
        """How many of its constants are the constructor's."""
        return len(self.patterns[0].constants)

    @property
    def key(self) -> Hashable:
        """What classes have in common that can be one."""
        return self.text.frame, *(one.shape for one in self.patterns)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a constructor.

    default
        The text of its default, None where it has to be given.
    by_keyword
        Whether it is given behind its name.
    places
        Which of the class's constants it stands for.
    values
        What each of the classes has there.
    """

    name: str
    annotation: str
    default: str | None
    by_keyword: bool
    places: tuple[int, ...]
    values: tuple[str, ...]

    @property
    def declaration(self) -> str:
        """``stride: int = 1``."""
        default = "" if self.default is None else f" = {self.default}"
        return f"{self.name}: {self.annotation}{default}"

    def given(self, member: int) -> Iterator[str]:
        """How one of the classes gives it; nothing where it has the default."""
        value = self.values[member]
        if value != self.default:
            yield f"{self.name}={value}" if self.by_keyword else value


_BY_THEMSELVES = ("kernel_size", "stride", "padding", "output_padding", "dilation")
"""What is equal to other numbers by chance."""


def differences(cluster: Sequence[Member]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """What differs: the values of all classes, and the places where these are."""
    found: dict[Hashable, tuple[int, ...]] = {}
    columns = [*zip(*(member.constants for member in cluster), strict=True)]
    for place, constants in enumerate(columns):
        values = tuple(constant.text for constant in constants)
        if len(set(values)) > 1:
            name = constants[0].use.name
            key = values, name if name in _BY_THEMSELVES else None
            found[key] = (*found.get(key, ()), place)
    return [(tuple(c.text for c in columns[places[0]]), places) for places in found.values()]


def arguments(cluster: Sequence[Member]) -> list[Argument]:
    """The arguments of a class that stands for all, as it takes them: those with defaults last."""
    first, differing = cluster[0], differences(cluster)
    uses = [[first.constants[place].use for place in places] for _, places in differing]
    names = argument_names(uses, _taken(first))
    found = []
    for name, own, (values, places) in zip(names, uses, differing, strict=True):
        default = _default(own)
        kind = first.constants[places[0]].kind
        in_forward = places[0] >= first.inside_constructor
        by_keyword = in_forward or own[0].by_keyword or default is not None
        annotation = _annotation(kind, {*values, *([default] if default is not None else [])})
        found.append(Argument(name, annotation, default, by_keyword, places, values))
    return sorted(found, key=lambda each: (each.default is not None, each.by_keyword))


def _default(uses: Sequence[Use]) -> str | None:
    """The default that all uses have."""
    defaults = {use.default for use in uses}
    return defaults.pop() if len(defaults) == 1 else None


def _annotation(kind: str, values: set[str]) -> str:
    """The type of constants of a kind; of sizes one number, or several."""
    if kind != "int":
        return kind.partition(" ")[0]
    types = {
        f"tuple[{', '.join(['int'] * len(value))}]" if isinstance(value, tuple) else "int"
        for value in map(ast.literal_eval, values)
    }
    return " | ".join(sorted(types))


def _taken(member: Member) -> set[str]:
    """Names that are none for arguments: what the module has, and all that its text speaks of."""
    taken = {text.partition(":")[0] for text in (*member.text.parameters, *member.text.fields)}
    for part in member.parts:
        for node in ast.walk(part.tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.Name(id=name):
                    taken.add(name)
                case ast.Constant(value=str() as name):
                    taken.add(name)
    return taken


def with_arguments(member: Member, given: Sequence[Argument]) -> ClassText:
    """A class with arguments in the place of its constants."""
    if not given:
        return member.text
    inside = member.inside_constructor
    names = {place: argument.name for argument in given for place in argument.places}
    init = {place: name for place, name in names.items() if place < inside}
    forward = {place: f"self.{name}" for place, name in names.items() if place >= inside}
    kept = (argument.name for argument in given if argument.places[-1] >= inside)
    return replace(
        member.text,
        parameters=(*member.text.parameters, *(argument.declaration for argument in given)),
        init=(*(f"self.{name} = {name}" for name in kept), *_written(member, 0, init)),
        forward=_written(member, 1, forward),
    )


def _written(member: Member, part: int, new: Mapping[int, str]) -> tuple[str, ...]:
    """A part of a class with other expressions in the places of constants."""
    source = member.parts[part]
    edits, left_out = [], dict[ast.Call, list[str]]()
    for place in sorted(new):
        old, text = member.constants[place], new[place]
        if old.call is None:
            edits.append(Edit(old.start, old.end, text))
        elif old.before is not None:
            edits.append(source.with_keyword(old.before, f"{old.use.name}={text}"))
        else:
            left_out.setdefault(old.call, []).append(f"{old.use.name}={text}")
    edits += [source.with_arguments(call, texts) for call, texts in left_out.items()]
    return tuple(source.replaced(edits).split("\n")) if source.text else ()
