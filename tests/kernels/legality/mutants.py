"""Mutants of lowered tasks: ways to change a good one, told by a number.

`mutant` changes one to three things of a good task as its number says: a shape, dtype, stride,
operand, call, byte of attributes, operator or argument of a call by name, one size throughout. The
same number gives the same mutant.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from shardwright.errors import ExecError, GraphError
from shardwright.ir.operators import resolve
from shardwright.ir.tensor_meta import DTYPES
from shardwright.kernels.lowered import BY_ID, BY_NAME, KINDS
from shardwright.ops.catalog import ALLOWED
from shardwright.torch_internals import schema_of
from tests.kernels.legality import tasks

SIZES = (0, 1, 2, 3, 4, 5, 8, 16, 17, -1)
NUMBERS = (0, 1, -1, 2, 7, 31, 63, 64, 127, 255, 2**15, 2**31 - 1, 2**31, 2**33, -(2**31), 2**62)
Text = dict[str, Any]
Change = Callable[[random.Random, Text], None]


def _value(rng: random.Random, text: Text) -> Text:
    return rng.choice(text["values"])


def _call(rng: random.Random, text: Text) -> Text:
    return rng.choice(text["calls"]) if text["calls"] else {"inputs": [], "outputs": []}


def _dtype(rng: random.Random, text: Text) -> None:
    """Of one value, or of all that had it."""
    value, new = _value(rng, text), rng.choice(sorted(DTYPES))
    old = value["dtype"]
    if rng.random() < 0.5:
        value["dtype"] = new
        return
    new = rng.choice((new, "f64", "f16", "bf16"))
    for value in text["values"]:
        value["dtype"] = new if value["dtype"] == old else value["dtype"]


def _shape(rng: random.Random, text: Text) -> None:
    shape = _value(rng, text)["shape"]
    place, how = rng.randint(0, len(shape)), rng.choice(("size", "insert", "remove"))
    if how == "insert" or place == len(shape):
        shape.insert(place, rng.choice(SIZES))
    elif how == "remove":
        del shape[place]
    else:
        shape[place] = rng.choice(SIZES)


def _size(rng: random.Random, text: Text) -> None:
    """One size is another throughout: in shapes, in views and in the arguments of generic calls."""
    shapes = [value["shape"] for value in text["values"]]
    old = rng.choice([size for shape in shapes for size in shape] or [0])
    new = rng.choice((1, 2, 3, 5, 7, 9, 15, 16, 17, 31, 33, 64, 65))
    for shape in shapes:
        shape[:] = [new if size == old else size for size in shape]
    for value in text["values"]:
        value.pop("strides", None)
    for call in text["calls"]:
        kind = BY_ID.get(call["kind"])
        if kind is None or kind.name not in ("view", "generic"):
            continue
        try:
            attrs = kind.unpack(call["schema"], base64.b64decode(call["blob"]))
            if kind.name == "generic":
                attrs["call"] = json.dumps(_replaced(json.loads(attrs["call"]), old, new))
            else:
                attrs = _other_view(attrs, old, new)
        except (ExecError, ValueError, KeyError):  # it was changed before
            continue
        with suppress(ExecError):  # a number does not fit, after changes before this one
            call["schema"], blob = kind.pack(attrs)
            call["blob"] = base64.b64encode(blob).decode()


def _other_view(attrs: dict[str, Any], old: int, new: int) -> dict[str, Any]:
    """A view of another size; strides go by the order that they had."""
    shape, strides = attrs["shape"], attrs["strides"]
    made = tuple(new if size == old else size for size in shape)
    steps, step = [0] * len(made), 1
    for dim in sorted(range(len(made)), key=lambda dim: (strides[dim], -dim)):
        steps[dim], step = (step if strides[dim] else 0), step * made[dim]
    return {**attrs, "shape": made, "strides": tuple(steps)}


def _replaced(found: Any, old: int, new: int) -> Any:
    """The same with a whole number another; tensors keep their places."""
    if isinstance(found, dict):
        changed = {key: item for key, item in found.items() if key not in ("ref", "input")}
        return {**found, **{key: _replaced(item, old, new) for key, item in changed.items()}}
    if isinstance(found, list):
        return [_replaced(item, old, new) for item in found]
    return new if type(found) is int and found == old else found


def _strides(rng: random.Random, text: Text) -> None:
    value = _value(rng, text)
    value["strides"] = [rng.choice((0, 1, 2, 3, 5, 8, 20, 64)) for _ in value["shape"]]


def _blob(rng: random.Random, text: Text) -> None:
    """A byte, a number of four or eight bytes, or the length."""
    call = _call(rng, text)
    blob = bytearray(base64.b64decode(call.get("blob", "")))
    place, how = rng.randint(0, len(blob)), rng.choice(("byte", "bit", "word", "long", "cut"))
    if place == len(blob):
        blob.append(rng.randint(0, 255))
    elif how == "cut":
        del blob[place:]
    elif how in ("word", "long"):
        size = 4 if how == "word" else 8
        number = rng.choice(NUMBERS) % 2 ** (8 * size)
        blob[place : place + size] = number.to_bytes(size, "little")
    else:
        blob[place] = rng.randint(0, 255) if how == "byte" else blob[place] ^ 1 << rng.randint(0, 7)
    call["blob"] = base64.b64encode(blob).decode()


def _operand(rng: random.Random, text: Text) -> None:
    """Another in the place of one: of the same shape and dtype, or any."""
    call = _call(rng, text)
    if side := call[rng.choice(("inputs", "outputs"))]:
        at = rng.randrange(len(side))
        alike = _alike(text, side[at]) if rng.random() < 0.6 else []
        side[at] = rng.choice(alike or [rng.randint(-1, len(text["values"]))])


def _alike(text: Text, number: int) -> list[int]:
    """The values before this one that have its shape and dtype."""
    values = text["values"]
    if not 0 <= number < len(values):
        return []
    wanted = values[number]["shape"], values[number]["dtype"]
    return [k for k in range(number) if (values[k]["shape"], values[k]["dtype"]) == wanted]


def _operands(rng: random.Random, text: Text) -> None:
    """One more, one less, or two the other way round."""
    side = _call(rng, text)[rng.choice(("inputs", "outputs"))]
    how = rng.choice(("more", "less", "swap"))
    if how == "more":
        side.insert(rng.randint(0, len(side)), rng.randint(-1, len(text["values"])))
    elif side and how == "less":
        side.pop(rng.randrange(len(side)))
    elif side:
        rng.shuffle(side)


def _kind(rng: random.Random, text: Text) -> None:
    """Of another kind, which takes as many operands; or only another number."""
    call = _call(rng, text)
    counts = len(call["inputs"]), len(call["outputs"])
    others = [kind for kind in KINDS if kind.takes(*counts) and kind.has_defaults]
    if rng.random() < 0.6 and others:
        call["kind"], call["schema"], call["blob"] = rng.choice(others).id, 0, ""
    else:
        call[rng.choice(("kind", "schema"))] = rng.randint(0, 44)


def _outputs(rng: random.Random, text: Text) -> None:
    outputs = text["outputs"]
    if outputs:
        outputs[rng.randrange(len(outputs))] = rng.randint(0, len(text["values"]))


def _calls(rng: random.Random, text: Text) -> None:
    """A call less, twice, or at another place; mostly with values numbered as that asks for."""
    calls, values = text["calls"], text["values"]
    if not calls:
        return
    at, how = rng.randrange(len(calls)), rng.choice(("less", "twice", "moved"))
    call = json.loads(json.dumps(calls[at]))
    if how != "twice":
        del calls[at]
    if how != "less":
        calls.insert(rng.randint(0, len(calls)), call)
    if rng.random() < 0.3:
        return
    if how == "twice":
        made = [number for number in call["outputs"] if 0 <= number < len(values)]
        values += [dict(values[number]) for number in made]
        call["outputs"] = [*range(len(values) - len(made), len(values))]
    if how == "less":
        for number in call["outputs"]:
            _replace(text, number, rng.choice(_alike(text, number) or [number]))
    _number(text)


def _replace(text: Text, old: int, new: int) -> None:
    """Whoever reads a value reads another."""
    for call in text["calls"]:
        call["inputs"] = [new if number == old else number for number in call["inputs"]]
    text["outputs"] = [new if number == old else number for number in text["outputs"]]


def _number(text: Text) -> None:
    """Number the values as they come to be; those that nothing makes go."""
    values = text["values"]
    made = [number for call in text["calls"] for number in call["outputs"]]
    order = [number for number in (*range(text["inputs"]), *made) if 0 <= number < len(values)]
    numbers = {old: new for new, old in enumerate(order)}
    for call in text["calls"]:
        for side in ("inputs", "outputs", "saved"):
            call[side] = [numbers.get(number, number) for number in call.get(side, ())]
    text["outputs"] = [numbers.get(number, number) for number in text["outputs"]]
    text["values"] = [values[number] for number in order]


def _inputs(rng: random.Random, text: Text) -> None:
    """More or fewer; or a value that a call made comes in."""
    if rng.random() < 0.5 or not text["calls"]:
        text["inputs"] += rng.choice((-1, 1, 2))
        return
    call = text["calls"].pop(rng.randrange(len(text["calls"])))
    made = [number for number in call["outputs"] if 0 <= number < len(text["values"])]
    text["calls"].insert(0, {"kind": -1, "inputs": [], "outputs": made})
    _number(text)
    text["calls"].pop(0)
    text["inputs"] += len(made)


def _generic(rng: random.Random, text: Text) -> None:
    """A number among the arguments of a generic call, or another operator, mostly one alike."""
    generic = BY_NAME["generic"]
    calls = [call for call in text["calls"] if call["kind"] == generic.id]
    if not calls:
        return _blob(rng, text)
    call = rng.choice(calls)
    try:
        attrs = generic.unpack(call["schema"], base64.b64decode(call["blob"]))
        given = json.loads(attrs["call"])
    except (ExecError, ValueError):  # it was changed before
        return _blob(rng, text)
    if rng.random() < 0.25:
        attrs["op"] = rng.choice(_others_like(attrs["op"]) if rng.random() < 0.7 else _operators())
    else:
        attrs["call"] = json.dumps(_other_number(rng, given))
    call["schema"], blob = generic.pack(attrs)
    call["blob"] = base64.b64encode(blob).decode()


def _other_number(rng: random.Random, found: Any) -> Any:
    """The same with one of its numbers another."""
    places: list[tuple[Any, Any]] = []

    def look(item: Any) -> None:
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        for key, part in pairs:
            if isinstance(part, dict | list):
                look(part)
            elif isinstance(part, int | float) or part is None:
                places.append((item, key))

    look(found)
    if places:
        item, key = rng.choice(places)
        item[key] = rng.choice((*NUMBERS, *SIZES, None, True, 0.5, [1], [2, 2]))
    return found


TRUSTING = (
    *("aten.as_strided.default", "aten._reshape_alias.default", "aten.resize.default"),
    *("aten.embedding_dense_backward.default", "aten.max_pool2d_with_indices_backward.default"),
    *("aten.adaptive_max_pool2d_backward.default", "aten.segment_reduce.default"),
    *(
        "aten._convert_indices_from_csr_to_coo.default",
        "aten.take.default",
        "aten.index_put.default",
    ),
    *("aten.max_unpool2d.default", "aten.unfold_backward.default", "aten.put.default"),
    *("aten.empty.memory_format", "aten.empty_strided.default", "aten.select_backward.default"),
)
"""Operators that trust places or sizes, which a file may be made to name."""


@cache
def _operators() -> list[str]:
    """Every functional operator of torch that a file may call, and some that none may."""
    found = set(TRUSTING)
    for name in ALLOWED:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            if not schema_of(getattr(packet, overload)).is_mutable:
                found.add(f"aten.{name}.{overload}")
    return sorted(found)


@cache
def _others_like(op: str) -> list[str]:
    """Operators that take arguments of the same types."""
    return [other for other in _operators() if _types(other) == _types(op)] or [op]


@cache
def _types(op: str) -> tuple[str, ...]:
    try:
        return tuple(str(argument.type) for argument in schema_of(resolve(op)).arguments)
    except GraphError:  # it was changed before
        return ()


CHANGES: Mapping[str, Change] = {
    "dtype": _dtype,
    "shape": _shape,
    "size": _size,
    "strides": _strides,
    "blob": _blob,
    "operand": _operand,
    "operands": _operands,
    "kind": _kind,
    "outputs": _outputs,
    "calls": _calls,
    "inputs": _inputs,
    "generic": _generic,
}


class Mutant(NamedTuple):
    """A changed text, and the names of what was changed."""

    text: str
    changes: tuple[str, ...]


def mutant(seed: int) -> Mutant:
    """A seed's mutant."""
    rng = random.Random(seed)
    text = json.loads(rng.choice(tasks.texts()))
    changes = tuple(rng.choice(sorted(CHANGES)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    for name in changes:
        CHANGES[name](rng, text)
    return Mutant(json.dumps(text), changes)
