"""How nested Python arguments and results fold into a flat list of tensors, and back.

A `Tree` describes one object: tensors are numbered leaves with names, and everything else (lists,
tuples, dicts, None, numbers, strings, dataclasses and other classes with fields) is kept, so
that the flat tensors and the tree together give the object again. `Arguments` is a tree a
parameter, under the signature of the captured callable.

Trees are msgspec Structs: the pipeline file holds them as they are (``Metadata.structure``).
Reading one never imports anything: an object of a class comes back as that class only if its
module is loaded already, and as a `AttributeDict`, a dict with attribute access, otherwise.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec
import torch

from shardwright.errors import InputError

Constant = None | bool | int | float | str


class Leaf(msgspec.Struct, frozen=True, tag="tensor", forbid_unknown_fields=True):
    """A tensor: number ``index`` of the flat list, with the name it has in the file."""

    name: str
    index: int


class Fixed(msgspec.Struct, frozen=True, tag="constant", forbid_unknown_fields=True):
    """A value that is part of the graph: None, a bool, a number or a string."""

    value: Constant = None


class FixedFloat(msgspec.Struct, frozen=True, tag="float", forbid_unknown_fields=True):
    """A constant float that JSON has no number for."""

    value: Literal["inf", "-inf", "nan"]


class ListTree(msgspec.Struct, frozen=True, tag="list", forbid_unknown_fields=True):
    """A list."""

    items: tuple[Tree, ...]


class TupleTree(msgspec.Struct, frozen=True, tag="tuple", forbid_unknown_fields=True):
    """A tuple."""

    items: tuple[Tree, ...]


class DictTree(msgspec.Struct, frozen=True, tag="dict", forbid_unknown_fields=True):
    """A dict whose keys are constants."""

    keys: tuple[Constant, ...]
    items: tuple[Tree, ...]


class ObjectTree(msgspec.Struct, frozen=True, tag="object", forbid_unknown_fields=True):
    """An instance of another class (``module:qualname``) with named fields, or a mapping's keys."""

    cls: str = msgspec.field(name="class")
    fields: tuple[Constant, ...]
    items: tuple[Tree, ...]


Tree = Leaf | Fixed | FixedFloat | ListTree | TupleTree | DictTree | ObjectTree


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter of the captured callable; ``value`` is None where it was not given."""

    name: str
    kind: str
    value: Tree | None = None


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signature of the captured callable, with what was given for each parameter."""

    parameters: tuple[Parameter, ...]


class AttributeDict(dict[Any, Any]):
    """A dict with attribute access, in place of an object whose class is not loaded."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


# --- from objects to trees ------------------------------------------------------------------------


class _Namer:
    """Hands out leaf names and indices: the smallest free ``name__k`` where a name is taken."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.tensors: list[torch.Tensor] = []

    def leaf(self, wanted: str, tensor: torch.Tensor) -> Leaf:
        name, k = wanted, 1
        while name in self.names:
            name, k = f"{wanted}__{k}", k + 1
        self.names.add(name)
        self.tensors.append(tensor)
        return Leaf(name, len(self.tensors) - 1)


def describe_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Arguments, list[torch.Tensor]]:
    """The structure of a call of ``function`` and its tensors in leaf order. Raises InputError."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the arguments do not fit the signature: {error}") from None
    namer = _Namer()
    parameters = []
    for name, parameter in bound.signature.parameters.items():
        value = None
        if name in bound.arguments:
            prefix = "" if parameter.kind is parameter.VAR_KEYWORD else name
            value = _describe(bound.arguments[name], prefix, name, namer)
        elif parameter.default is not parameter.empty and _is_constant(parameter.default):
            value = _fixed(parameter.default)
        parameters.append(Parameter(name, parameter.kind.name, value))
    return Arguments(tuple(parameters)), namer.tensors


def describe_result(result: Any) -> tuple[Tree, list[torch.Tensor]]:
    """The structure of a returned object and its tensors in leaf order. Raises InputError.

    Dicts and objects name their leaves by key or field; every other result is ``output``.
    """
    namer = _Namer()
    prefix = "" if _is_mapping(result) or _fields_of(result) is not None else "output"
    return _describe(result, prefix, "output", namer), namer.tensors


def _describe(value: Any, prefix: str, path: str, namer: _Namer) -> Tree:
    """The tree of ``value``; ``prefix`` begins its leaves' names, ``path`` says where it is."""
    if isinstance(value, torch.Tensor):
        return namer.leaf(prefix, value)
    if _is_constant(value):
        return _fixed(value)
    if type(value) in (list, tuple, torch.Size):
        items = tuple(
            _describe(item, _join(prefix, i), f"{path}[{i}]", namer) for i, item in enumerate(value)
        )
        return ListTree(items) if type(value) is list else TupleTree(items)
    if type(value) is dict:
        return DictTree(_keys(value, path), _describe_items(value.items(), prefix, path, namer))
    fields = _fields_of(value)
    if fields is None:
        raise InputError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            "taken apart into tensors; pass tensors, numbers, strings, None, or lists, tuples, "
            "dicts and dataclasses of them"
        )
    cls = f"{type(value).__module__}:{type(value).__qualname__}"
    items = _describe_items(fields.items(), prefix, path, namer)
    return ObjectTree(cls, _keys(fields, path), items)


def _describe_items(items: Any, prefix: str, path: str, namer: _Namer) -> tuple[Tree, ...]:
    return tuple(_describe(item, _join(prefix, k), f"{path}[{k!r}]", namer) for k, item in items)


def _join(prefix: str, key: object) -> str:
    return f"{prefix}_{key}" if prefix else str(key)


def _is_constant(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _fixed(value: Constant) -> Fixed | FixedFloat:
    if isinstance(value, float) and not math.isfinite(value):
        return FixedFloat(cast(Any, str(value)))
    return Fixed(value)


def _keys(value: Mapping[Any, Any], path: str) -> tuple[Constant, ...]:
    for key in value:
        if not _is_constant(key) or (isinstance(key, float) and not math.isfinite(key)):
            raise InputError(f"{path} has the key {key!r}; keys must be strings, numbers or None")
    return tuple(value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _fields_of(value: Any) -> dict[Any, Any] | None:
    """Field names and values of a named tuple, a mapping's subclass or a dataclass; else None."""
    if isinstance(value, tuple) and (names := _tuple_fields(type(value))) is not None:
        return dict(zip(names, value, strict=True))
    if _is_mapping(value) and type(value) is not dict:
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _tuple_fields(cls: type) -> tuple[str, ...] | None:
    """The fields of a class made by namedtuple, or of torch's own results (torch.max)."""
    if cls.__module__ == "torch.return_types":
        return cast("tuple[str, ...]", cls.__match_args__)  # type: ignore[attr-defined]
    return getattr(cls, "_fields", None)


def with_keyword(arguments: Arguments, name: str) -> Arguments:
    """The same call with one more tensor, given by keyword; it comes before ``**kwargs``."""
    before = [p for p in arguments.parameters if p.kind != "VAR_KEYWORD"]
    place = sum(1 for _ in leaves(Arguments(tuple(before))))
    added = Parameter(name, "KEYWORD_ONLY", Leaf(name, place))
    behind = [
        p if p.value is None else msgspec.structs.replace(p, value=_moved(p.value))
        for p in arguments.parameters[len(before) :]
    ]
    return Arguments((*before, added, *behind))


def _moved(tree: Tree) -> Tree:
    """The tree with its leaves one further on."""
    if isinstance(tree, Leaf):
        return Leaf(tree.name, tree.index + 1)
    if isinstance(tree, (Fixed, FixedFloat)):
        return tree
    return msgspec.structs.replace(tree, items=tuple(map(_moved, tree.items)))


# --- from trees to objects ------------------------------------------------------------------------


def leaves(structure: Arguments | Tree) -> Iterator[Leaf]:
    """The leaves, in order of their index."""
    if isinstance(structure, Arguments):
        for parameter in structure.parameters:
            if parameter.value is not None:
                yield from leaves(parameter.value)
    elif isinstance(structure, Leaf):
        yield structure
    elif not isinstance(structure, (Fixed, FixedFloat)):
        for item in structure.items:
            yield from leaves(item)


def rebuild(tree: Tree, tensors: Sequence[Any]) -> Any:
    """The object that ``tree`` describes, with ``tensors[leaf.index]`` at each leaf."""
    match tree:
        case Leaf():
            return tensors[tree.index]
        case Fixed():
            return tree.value
        case FixedFloat():
            return float(tree.value)
        case ListTree():
            return [rebuild(item, tensors) for item in tree.items]
        case TupleTree():
            return tuple(rebuild(item, tensors) for item in tree.items)
        case DictTree():
            return {
                key: rebuild(item, tensors) for key, item in zip(tree.keys, tree.items, strict=True)
            }
        case ObjectTree():
            return _rebuild_object(tree, tensors)


def _rebuild_object(tree: ObjectTree, tensors: Sequence[Any]) -> Any:
    fields = {
        key: rebuild(item, tensors) for key, item in zip(tree.fields, tree.items, strict=True)
    }
    cls = _loaded_class(tree.cls)
    if cls is not None and dataclasses.is_dataclass(cls):
        return _rebuild_dataclass(cls, fields)
    if cls is not None and issubclass(cls, Mapping):
        return _rebuild_mapping(cls, fields)
    if cls is not None and _tuple_fields(cls) == tree.fields:
        return _rebuild_tuple(cls, fields.values())
    return AttributeDict(fields)


def _rebuild_dataclass(cls: type, fields: dict[Any, Any]) -> Any:
    """An instance made by the constructor; fields that it does not take are set after it."""
    declared = {field.name: field.init for field in dataclasses.fields(cls)}
    if not fields.keys() <= declared.keys():
        return AttributeDict(fields)
    result = cls(**{name: value for name, value in fields.items() if declared[name]})
    for name, value in fields.items():
        if not declared[name]:
            object.__setattr__(result, name, value)
    return result


def _rebuild_mapping(cls: type, fields: dict[Any, Any]) -> Any:
    if issubclass(cls, defaultdict):
        return cls(None, fields)
    return cls(fields)  # type: ignore[call-arg]


def _rebuild_tuple(cls: type, values: Iterable[Any]) -> Any:
    return cls(values) if cls.__module__ == "torch.return_types" else cls(*values)


def _loaded_class(name: str) -> type | None:
    """The class ``module:qualname`` if its module is loaded already and has it."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


class CallArguments(NamedTuple):
    """Positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def rebuild_call(arguments: Arguments, tensors: Sequence[Any]) -> CallArguments:
    """The call that was captured, with ``tensors`` in place of its tensors.

    From the first constant on parameters are given by keyword where that is possible: it may be a
    default, and decorators that add a keyword do not expect one by position.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    positional = True
    spread = any(p.kind == "VAR_POSITIONAL" and p.value for p in arguments.parameters)
    for parameter in arguments.parameters:
        if parameter.value is None:
            positional = False
            continue
        named = parameter.kind == "POSITIONAL_OR_KEYWORD" and not spread
        if named and isinstance(parameter.value, Fixed):
            positional = False
        value = rebuild(parameter.value, tensors)
        if parameter.kind == "VAR_POSITIONAL":
            args.extend(value)
        elif parameter.kind == "VAR_KEYWORD":
            kwargs.update(value)
        elif positional and parameter.kind in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD"):
            args.append(value)
        elif parameter.kind != "POSITIONAL_ONLY":
            kwargs[parameter.name] = value
    return CallArguments(tuple(args), kwargs)


def flatten_call(
    arguments: Arguments, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors of a call in leaf order, after holding it against what was captured.

    Raises InputError where a parameter is unknown, missing, or of another structure, or where a
    value that is part of the graph differs from the captured one.
    """
    bound = _bind(arguments, args, kwargs)
    found: list[torch.Tensor] = []
    for parameter in arguments.parameters:
        if parameter.name not in bound:
            if parameter.value is not None and any(leaves(parameter.value)):
                raise InputError(f"input {parameter.name!r} is missing; {_wanted(arguments)}")
        elif parameter.value is None:
            given = bound[parameter.name]
            names = given if parameter.kind == "VAR_KEYWORD" else (parameter.name,)
            raise InputError(
                f"input {', '.join(map(repr, names))} was not given at capture; "
                f"{_wanted(arguments)}; capture again to add one"
            )
        else:
            _collect(parameter.value, bound[parameter.name], parameter.name, found)
    return found


def _bind(arguments: Arguments, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call gives for each parameter; those left out are absent. Raises InputError."""
    variadic = ("VAR_POSITIONAL", "VAR_KEYWORD")
    signature = inspect.Signature(
        [
            inspect.Parameter(
                p.name,
                getattr(inspect.Parameter, p.kind),
                default=inspect.Parameter.empty if p.kind in variadic else None,
            )
            for p in arguments.parameters
        ]
    )
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise InputError(f"{error}; {_wanted(arguments)}") from None


def _wanted(arguments: Arguments) -> str:
    names = ", ".join(p.name for p in arguments.parameters if p.value is not None)
    return f"the inputs are: {names or 'none'}"


def _collect(tree: Tree, value: Any, path: str, found: list[torch.Tensor]) -> None:
    """Append the tensors of ``value`` to ``found``; raise InputError where it is not ``tree``."""
    match tree:
        case Leaf():
            if not isinstance(value, torch.Tensor):
                raise InputError(f"input {path} must be a tensor, found {_kind(value)}")
            found.append(value)
        case Fixed() | FixedFloat():
            captured = rebuild(tree, ())
            if type(value) is not type(captured) or _fixed(value) != tree:
                number = isinstance(captured, (int, float)) and not isinstance(captured, bool)
                advice = f", or capture with a tensor (torch.tensor({captured!r})) and pass one"
                raise InputError(
                    f"input {path} is {_kind(value)}, but the graph was captured with "
                    f"{captured!r}, which is part of it; capture again with the new value"
                    f"{advice if number else ''}"
                )
        case ListTree() | TupleTree():
            kind = list if isinstance(tree, ListTree) else tuple
            if not isinstance(value, kind) or len(value) != len(tree.items):
                raise InputError(
                    f"input {path} must be a {kind.__name__} of {len(tree.items)}, "
                    f"found {_kind(value)}"
                )
            for i, (item, part) in enumerate(zip(tree.items, value, strict=True)):
                _collect(item, part, f"{path}[{i}]", found)
        case DictTree():
            _collect_fields(tree.keys, tree.items, value, path, found)
        case ObjectTree():
            fields = _fields_of(value)
            _collect_fields(
                tree.fields, tree.items, value if fields is None else fields, path, found
            )


def _collect_fields(
    keys: Sequence[Any], items: Sequence[Tree], value: Any, path: str, found: list[torch.Tensor]
) -> None:
    if not _is_mapping(value) or set(value) != set(keys):
        raise InputError(
            f"input {path} must have the keys {', '.join(map(repr, keys))}, found {_kind(value)}"
        )
    for key, item in zip(keys, items, strict=True):
        _collect(item, value[key], f"{path}[{key!r}]", found)


def _kind(value: Any) -> str:
    """A value in a message: constants as they are, containers with their size."""
    if _is_constant(value):
        return repr(value)
    if _is_mapping(value):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, Sequence):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
