"""Rows of operators that move elements without computing: reshape, permute, expand, cut and join.

    view, (2, 12, 32) as (2, 12, 4, 8)     a b (c d) -> a b c d
    transpose of 1 and 2                   a b c -> a c b
    chunk in 3 of dimension 1              a 96 -> a 32, a 32, a 32

Sizes among the arguments are those of the whole; a part's are its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright.ops.call import (
    CatalogCall,
    Dims,
    Direct,
    Emit,
    Emitter,
    Inputs,
    Local,
    OperatorRow,
    Rule,
    Shape,
    SplitRule,
    aligned,
    along,
    fixed,
    letters,
    named,
    numbers,
    table,
    text,
)

FIRST = ((0,),)
"""Linear in the first input."""


# --- reshape ------------------------------------------------------------------------------------


def factorize(before: Shape, after: Shape) -> tuple[list[Dims], list[Dims], dict[str, int]]:
    """The common factors of two shapes in row-major order, for each dimension of both; lengths.

    ``(6, 4)`` and ``(8, 3)`` share a leading factor of 2, whose rest (``3 4`` and ``4 3``) is
    written in numbers: nothing in it splits both.
    """
    ends: tuple[list[Dims], list[Dims]] = ([[] for _ in before], [[] for _ in after])
    rests = (list(before), list(after))
    places = [0, 0]
    lengths: dict[str, int] = {}
    names = iter(letters(len(before) + len(after) + 1))
    while True:
        for side in (0, 1):
            while places[side] < len(rests[side]) and rests[side][places[side]] == 1:
                places[side] += 1
        if places[0] == len(before) or places[1] == len(after):
            return (*ends, lengths)
        sizes = [rests[side][places[side]] for side in (0, 1)]
        shared = math.gcd(*sizes)
        if shared == 1:
            _fill_in_numbers(ends, rests, places)
            continue
        name = next(names)
        lengths[name] = shared
        for side in (0, 1):
            ends[side][places[side]].append(name)
            rests[side][places[side]] //= shared


def _fill_in_numbers(
    ends: Sequence[list[Dims]], rests: Sequence[list[int]], places: list[int]
) -> None:
    """Write the sizes at hand as numbers, until both sides have passed as many elements."""
    products = [1, 1]
    while products[0] != products[1] or products[0] == 1:
        side = 0 if products[0] <= products[1] else 1
        place = places[side]
        products[side] *= rests[side][place]
        if rests[side][place] != 1:
            ends[side][place].append(str(rests[side][place]))
        rests[side][place] = 1
        places[side] += 1


def bracketed(dims: Sequence[Dims]) -> Dims:
    """Each dimension's factors in brackets, where they are several; ``1`` where there is none."""
    return [
        "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"
        for factors in dims
    ]


def reshape(
    attrs: Callable[[Local], Mapping[str, Any]] | None = None, emit: Emit | None = None
) -> SplitRule:
    """A rule for reshaping: the dimensions' common factors, where a part has its own sizes."""

    def rule(call: CatalogCall) -> Rule:
        before, after = call.inputs[0], call.outputs[0]
        if 0 in before:
            return Rule(text([numbers(before)], [numbers(after)]))
        left, right, lengths = factorize(before, after)
        annotation = text([bracketed(left)], [bracketed(right)])
        return Rule(annotation, lengths=lengths, attrs=attrs, emit=emit, linear=FIRST)

    return rule


def sizes_of_unflatten(local: Local) -> dict[str, list[int]]:
    """The sizes that one dimension becomes, here."""
    dim = local.call.dim()
    return {"sizes": local.size()[dim : dim + len(local.call.attrs["sizes"])]}


def reshaped(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """A part reshaped to its own sizes."""
    return e.call("aten.reshape.default", inputs[0], local.size())


RESHAPED = {
    **table(reshape(emit=reshaped), "view squeeze squeeze.dim", free=True),
    **table(reshape(emit=reshaped), "_unsafe_view squeeze.dims"),
}
"""A part may be a slice, of which there is no view, or have a size of 1 that is to stay."""


def permute(call: CatalogCall) -> Rule:
    """Each dimension keeps its name where it goes, as the operator says itself."""
    shape = call.inputs[0]
    order = torch.empty(tuple(range(len(shape))), device="meta")
    names = named(shape)
    permuted = Direct("meta").emit(call.op, [order], call.attrs).shape
    return Rule(text([names], [[names[dim] for dim in permuted]]), linear=FIRST)


# --- expand and repeat --------------------------------------------------------------------------


def expand(call: CatalogCall) -> Rule:
    """New sizes are identifiers that only the output has."""
    shape, full = call.inputs[0], call.outputs[0]
    names = named(full)
    lengths = {name: size for name, size in zip(names, full, strict=True) if name != "1"}
    return Rule(
        text([aligned(shape, names, full)], [names]),
        lengths=lengths,
        attrs=lambda local: {"size": local.size()},
        linear=FIRST,
    )


def repeat(name: str) -> SplitRule:
    """A rule for repeating the whole: ``a -> (r a)``, where the copies split."""

    def rule(call: CatalogCall) -> Rule:
        shape, full = call.inputs[0], call.outputs[0]
        repeats = list(call.attrs[name])
        missing = len(full) - len(repeats)
        repeats = [1] * missing + repeats
        ends = dict(enumerate(letters(len(full)), start=len(shape) - len(full)))
        copies = {f"r{i}": count for i, count in enumerate(repeats) if count != 1}
        inputs = ["1" if shape[i] == 1 else ends[i] for i in range(len(shape))]
        padded = ["1"] * (len(full) - len(shape)) + inputs
        output = [
            kept if f"r{i}" not in copies else f"r{i}" if kept == "1" else f"(r{i} {kept})"
            for i, kept in enumerate(padded)
        ]

        def attrs(local: Local) -> dict[str, list[int]]:
            counts = [local.lengths.get(f"r{i}", 1) for i in range(len(full))]
            return {name: counts[missing:]}

        return Rule(text([inputs], [output]), lengths=copies, attrs=attrs, linear=FIRST)

    return rule


def repeat_interleave(call: CatalogCall) -> Rule:
    """Each element several times in a row: ``a -> (a r)``, where what is repeated splits."""
    shape, dim = call.inputs[0], call.attrs["dim"]
    names = named(shape, without="r")
    copies = str(call.attrs["repeats"])

    def repeated(factors: Dims) -> str:
        kept = [factor for factor in (*factors, copies) if factor != "1"]
        return bracketed([kept])[0]

    if dim is None:
        output = [repeated(names)]
    else:
        output = [repeated([name]) if i == call.dim() else name for i, name in enumerate(names)]
    changed = {"output_size": None}
    return Rule(text([names], [output]), attrs=lambda local: changed, linear=FIRST)


# --- cut and join -------------------------------------------------------------------------------


def pieces(call: CatalogCall, *, by_length: bool = False) -> Rule:
    """Slices of one dimension, in one or several outputs: that one stays whole.

    Where all of it is taken it may be split, unless the call names its length.
    """
    kept = set() if not by_length and _is_unchanged(call) else {call.dim()}
    return along(call, kept, linear=FIRST)


def pieces_of_length(call: CatalogCall) -> Rule:
    """The same by operators that are told how long their results are."""
    return pieces(call, by_length=True)


def concatenation(call: CatalogCall) -> Rule:
    """Several inputs joined along one dimension, which stays whole."""
    shape = max(call.inputs, key=len)
    kept = set() if _is_unchanged(call) else {int(call.attrs["dim"]) % len(shape)}
    return along(call, kept, shape=shape, linear=(tuple(range(len(call.inputs))),))


def _is_unchanged(call: CatalogCall) -> bool:
    return all(item == call.inputs[0] for item in call.tensors())


def one_less(call: CatalogCall) -> Rule:
    """Slices that lose their dimension: select, unbind."""
    return along(call, {call.dim()}, linear=FIRST)


def stack(call: CatalogCall) -> Rule:
    """Inputs joined along a new dimension, which stays whole."""
    shape = call.outputs[0]
    dim = int(call.attrs["dim"]) % len(shape)
    return along(call, {dim}, shape=shape, linear=(tuple(range(len(call.inputs))),))


def turned(call: CatalogCall) -> Rule:
    """Elements in another order along certain dimensions: flip, roll."""
    return along(call, call.dims("dims"), linear=FIRST)


def pad(call: CatalogCall) -> Rule:
    """Padded dimensions stay whole."""
    last = len(call.inputs[0]) - 1
    dims = {last - i // 2 for i, amount in enumerate(call.attrs["pad"]) if amount != 0}
    zero = call.attrs.get("mode", "constant") != "constant" or not call.attrs.get("value")
    return along(call, dims, linear=FIRST if zero else ())


def triangle(call: CatalogCall) -> Rule:
    """A triangle of the last two dimensions; a part's diagonal is moved by where it starts."""
    names = [*letters(len(call.inputs[0]) - 2, without="mn"), "m", "n"]

    def attrs(local: Local) -> dict[str, int]:
        return {"diagonal": call.attrs["diagonal"] + local.start("m") - local.start("n")}

    return Rule(text([names], [names]), attrs=attrs, linear=FIRST)


def diagonal(call: CatalogCall) -> Rule:
    """The diagonal of two dimensions, which stay whole, at the end."""
    shape = call.inputs[0]
    dims = {call.dim("dim1"), call.dim("dim2")}
    names = fixed(named(shape), shape, dims)
    kept = [name for i, name in enumerate(names) if i not in dims]
    return Rule(text([names], [[*kept, str(call.outputs[0][-1])]]), linear=FIRST)


def windows(call: CatalogCall) -> Rule:
    """Windows along one dimension, which stays whole; their elements are a new last one."""
    shape, full = call.inputs[0], call.outputs[0]
    dim = call.dim("dimension")
    names = named(shape)
    output = fixed(names, full, {dim})
    return Rule(text([fixed(names, shape, {dim})], [[*output, str(full[-1])]]), linear=FIRST)


def meshgrid(call: CatalogCall) -> Rule:
    """Each input along a dimension of its own, in every output."""
    sizes = [shape[0] if shape else 1 for shape in call.inputs]
    names = ["1" if size == 1 else name for size, name in zip(sizes, letters(9), strict=False)]
    output = list(names)
    if call.attrs.get("indexing") == "xy" and len(names) > 1:
        output[:2] = reversed(output[:2])
    inputs = [[name] if shape else [] for name, shape in zip(names, call.inputs, strict=True)]
    return Rule(text(inputs, [output] * len(names)))


def pixel_shuffle(call: CatalogCall) -> Rule:
    """Channels become places: ``(c r s) h w -> c (h r) (w s)``."""
    factor = int(call.attrs["upscale_factor"])
    lead = letters(len(call.inputs[0]) - 3, without="chw")
    inputs = [*lead, f"(c {factor} {factor})", "h", "w"]
    return Rule(text([inputs], [[*lead, "c", f"(h {factor})", f"(w {factor})"]]), linear=FIRST)


def pixel_unshuffle(call: CatalogCall) -> Rule:
    """Places become channels: ``c (h r) (w s) -> (c r s) h w``."""
    factor = int(call.attrs["downscale_factor"])
    lead = letters(len(call.inputs[0]) - 3, without="chw")
    inputs = [*lead, "c", f"(h {factor})", f"(w {factor})"]
    return Rule(text([inputs], [[*lead, f"(c {factor} {factor})", "h", "w"]]), linear=FIRST)


def as_complex(call: CatalogCall) -> Rule:
    """Pairs of the last dimension become numbers, or the other way round."""
    ends = [[*named(min(call.inputs[0], call.outputs[0], key=len))] for _ in range(2)]
    ends[len(call.outputs[0]) > len(call.inputs[0])].append("2")
    return Rule(text(ends[:1], ends[1:]), linear=FIRST)


ROWS: Mapping[str, OperatorRow] = {
    **RESHAPED,
    **table(reshape(), "flatten.using_ints unsqueeze", free=True),
    **table(reshape(), "ravel"),
    **table(reshape(lambda local: {"shape": local.size()}), "reshape", free=True),
    **table(reshape(sizes_of_unflatten), "unflatten.int", free=True),
    **table(permute, "permute transpose.int t", free=True),
    **table(permute, "swapaxes swapdims movedim.int movedim.intlist numpy_T mT"),
    **table(expand, "expand", free=True),
    **table(expand, "broadcast_to"),
    **table(repeat("repeats"), "repeat"),
    **table(repeat("dims"), "tile"),
    **table(repeat_interleave, "repeat_interleave.self_int"),
    **table(pieces, "slice.Tensor split.Tensor chunk", free=True),
    **table(pieces, "tensor_split.sections tensor_split.indices unsafe_chunk"),
    **table(pieces_of_length, "split_with_sizes", free=True),
    **table(pieces_of_length, "narrow split.sizes"),
    **table(one_less, "select.int unbind.int", free=True),
    **table(concatenation, "cat concat"),
    **table(stack, "stack"),
    **table(turned, "flip roll"),
    **table(pad, "pad constant_pad_nd"),
    **table(triangle, "tril triu"),
    **table(diagonal, "diagonal"),
    **table(windows, "unfold"),
    **table(meshgrid, "meshgrid.indexing meshgrid"),
    **table(pixel_shuffle, "pixel_shuffle"),
    **table(pixel_unshuffle, "pixel_unshuffle"),
    **table(as_complex, "view_as_complex view_as_real"),
}
