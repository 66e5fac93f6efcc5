"""The constants in generated code, and the pattern that is left without them.

Comes in: Python's text, with the parameters of what it calls. Goes out: its constants in order,
each with its use, and the text's pattern. What always holds: texts of one pattern have equally
many constants, the first of one where the first of the other is, and would be equal if these were.

Numbers, dtypes, truth values and words that are keywords' are constants; other texts are names,
which belong to the pattern. A call whose parameters are known has those that it leaves out, too:
`nn.Conv2d(3, 8, 1)` and `nn.Conv2d(3, 8, 1, stride=2)` have one pattern.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from shardwright.codegenerate.writing.parameters import (
    SIZE,
    VALUE,
    WIDTH,
    Parameter,
    Signature,
    layer_signature,
    operand_word,
    operator_word,
)
from shardwright.codegenerate.writing.source_text import SourceText


@dataclass(frozen=True, slots=True)
class Use:
    """What a constant is for.

    name
        The parameter's that it is given to.
    default
        The text of what that parameter is where it is not given.
    by_keyword
        Whether it stands, or would stand, behind the parameter's name.
    constructs
        Whether the parameter is one of a constructor, whose own names are good.
    tensor, rank
        The parameter of the module one of whose sizes it is, and how many of these that has.
    """

    name: str = VALUE
    default: str | None = None
    by_keyword: bool = False
    constructs: bool = False
    tensor: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant: how it is written, of what kind it is, and where it stands, in bytes.

    call, before
        Of one that is not written, the call that leaves it out and the keyword that follows it.
    """

    text: str
    kind: str
    use: Use
    start: int = 0
    end: int = 0
    call: ast.Call | None = None
    before: ast.keyword | None = None


class Pattern(NamedTuple):
    """A text without its constants, and these."""

    shape: Hashable
    constants: tuple[Constant, ...]


def pattern(
    source: SourceText,
    signature: Callable[[str], Signature | None] = layer_signature,
    classes: Mapping[str, Hashable] | None = None,
) -> Pattern:
    """The pattern of a text.

    signature
        The parameters of what is called under a name, None where they are not known.
    classes
        What stands for names in the pattern.
    """
    reader = _Reader(source, signature, classes or {})
    shape = reader.shape(source.tree)
    return Pattern(shape, tuple(reader.constants))


@dataclass
class _Reader:
    """Walks through a text once; gives shapes, keeps constants."""

    source: SourceText
    signature: Callable[[str], Signature | None]
    classes: Mapping[str, Hashable]
    constants: list[Constant] = field(default_factory=list)
    tensor: str = ""

    def shape(self, node: object, use: Use = Use()) -> Hashable:
        """What is left of a node."""
        if isinstance(node, list):
            return tuple(self.shape(item, use) for item in node)
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.expr) and (kind := kind_of(node, use)) is not None:
            start, end = self.source.span(node)
            self.constants.append(Constant(ast.unparse(node), kind, use, start, end))
            return ("constant", kind)
        match node:
            case ast.Call():
                return self._call(node)
            case ast.Name(id=name):
                return ("name", self.classes.get(name, name))
            case ast.stmt():
                self.tensor = _parameter_of(node)
            case ast.BinOp(op=operator):
                return self._parts(node, Use(operator_word(operator)))
            case ast.Compare():
                return self._parts(node, Use("threshold"))
            case ast.Subscript():
                return self._parts(node, Use("index"))
            case ast.Slice(lower=lower, upper=upper, step=step):
                parts = {"start": lower, "stop": upper, "step": step}
                return ("slice", *(self.shape(part, Use(name)) for name, part in parts.items()))
            case ast.Tuple() | ast.List():
                return self._parts(node, use)
        return self._parts(node, Use())

    def _parts(self, node: ast.AST, use: Use) -> Hashable:
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _UNREAD)
        return (type(node).__name__, *(self.shape(value, use) for _, value in fields))

    def _call(self, node: ast.Call) -> Hashable:
        name = ast.unparse(node.func) if _is_dotted(node.func) else ""
        signature = self.signature(name) if name else None
        bound = _bound(node, signature) if signature is not None else None
        if signature is not None and bound is not None:
            given = [self._given(node, signature, each, bound) for each in signature]
            return ("call", self.classes.get(name, name), tuple(given))
        function = self.shape(node.func)
        uses = list(self._uses(node))
        arguments = [self.shape(a, use) for a, use in zip(node.args, uses, strict=True)]
        keywords = [
            (each.arg, self.shape(each.value, Use(each.arg or VALUE, by_keyword=True)))
            for each in node.keywords
        ]
        return ("call", function, tuple(arguments), tuple(keywords))

    def _given(
        self,
        node: ast.Call,
        signature: Signature,
        parameter: Parameter,
        bound: Mapping[str, ast.expr],
    ) -> Hashable:
        """An argument of a call whose parameters are known."""
        value = bound.get(parameter.name)
        by_keyword = value is None or all(value is not argument for argument in node.args)
        use = Use(parameter.name, parameter.default, by_keyword, constructs=True)
        if value is not None:
            return self.shape(value, use)
        assert parameter.default is not None
        default = ast.parse(parameter.default, mode="eval").body
        kind = kind_of(default, use)
        if kind is None:
            return self.shape(default, use)
        names = [each.name for each in signature]
        later = names[names.index(parameter.name) + 1 :]
        before = next((keyword for keyword in node.keywords if keyword.arg in later), None)
        self.constants.append(Constant(ast.unparse(default), kind, use, call=node, before=before))
        return ("constant", kind)

    def _uses(self, node: ast.Call) -> Iterator[Use]:
        rank = len(node.args)
        is_parameter = bool(self.tensor) and ast.unparse(node.func) == "torch.empty"
        for place in range(rank):
            if is_parameter:
                word = WIDTH if place == rank - 1 else SIZE
                yield Use(word, tensor=self.tensor, rank=rank)
            else:
                yield Use(operand_word(node.func, place, rank))


_UNREAD = ("ctx", "kind", "type_comment", "type_ignores")
"""Fields of a syntax tree that no two texts of one meaning differ in."""


def kind_of(node: ast.expr, use: Use) -> str | None:
    """The kind of a constant, ``int``; None of what is none."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return type(value).__name__
        case ast.Constant(value=str()) if use.by_keyword:
            return "str"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return type(value).__name__
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant()]):
            return "float"
        case ast.Attribute(value=ast.Call(func=function), attr="min" | "max"):
            return "float" if ast.unparse(function) == "torch.finfo" else None
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _kind_of_dtype(getattr(torch, name, None))
        case ast.Tuple(elts=[_, *_] as items) if use.constructs:
            inner = replace(use, constructs=False)
            return "int" if {kind_of(item, inner) for item in items} == {"int"} else None
    return None


def _kind_of_dtype(dtype: object) -> str | None:
    if not isinstance(dtype, torch.dtype):
        return None
    if dtype.is_complex:
        return "torch.dtype of complex numbers"
    return f"torch.dtype of {'numbers' if dtype.is_floating_point else 'whole numbers'}"


def _bound(call: ast.Call, signature: Signature) -> dict[str, ast.expr] | None:
    """The arguments of a call by parameter; None where they do not fit."""
    names = [parameter.name for parameter in signature]
    keywords = {each.arg: each.value for each in call.keywords if each.arg is not None}
    if len(keywords) < len(call.keywords) or len(call.args) > len(names):
        return None
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    bound = dict(zip(names, call.args, strict=False)) | keywords
    needed = {parameter.name for parameter in signature if parameter.default is None}
    return bound if needed <= bound.keys() <= set(names) else None


def _is_dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and _is_dotted(node.value)
    )


def _parameter_of(node: ast.stmt) -> str:
    """The name of the parameter that a statement declares, empty where it declares none."""
    match node:
        case (
            ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(func=function))
            | ast.AnnAssign(target=ast.Attribute(attr=name), value=ast.Call(func=function))
        ):
            return name if ast.unparse(function) == "nn.Parameter" else ""
    return ""
