"""Rows of layers: normalization, convolution, pooling, resizing, recurrence.

layer_norm    a b c^, c^, c^ -> a b c^
group_norm    n (g 4^) 8^ 8^, (g 4^), (g 4^) -> n (g 4^) 8^ 8^     the groups split
conv2d        n c+ 8 8, o c+ 3 3, o -> n o 6 6                     the bias is a term
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwright.ops.call import (
    CatalogCall,
    Dims,
    OperatorRow,
    Rule,
    SplitRule,
    along,
    named,
    numbers,
    table,
    text,
    whole,
)

# --- normalization ------------------------------------------------------------------------------


def layer_norm(call: CatalogCall) -> Rule:
    """The last dimensions, as many as the normalized shape has, stay whole."""
    shape, last = call.inputs[0], len(call.attrs["normalized_shape"])
    dims = set(range(len(shape) - last, len(shape)))
    names = whole(named(shape), dims)
    inputs = [names] + [names[len(shape) - last :]] * (len(call.inputs) - 1)
    statistics = ["1" if i in dims else name for i, name in enumerate(names)]
    return Rule(text(inputs, [names, *[statistics] * (len(call.outputs) - 1)]))


def group_norm(call: CatalogCall) -> Rule:
    """Rows and groups split: a part has its share of the groups."""
    shape, groups = call.inputs[0], int(call.attrs["num_groups"])
    channels = bracket("g", groups, f"{shape[1] // groups}")
    names = [*named(shape[:1], without="g"), channels, *map(str, shape[2:])]
    inputs = [names] + [[channels]] * (len(call.inputs) - 1)
    return Rule(
        text(inputs, [names]),
        lengths={"g": groups} if groups > 1 else {},
        attrs=lambda local: {"num_groups": local.lengths.get("g", 1)},
    )


def bracket(groups: str, number: int, rest: str) -> str:
    """The dimension of so many groups of ``rest``."""
    if number == 1:
        return rest
    return groups if rest == "1" else f"({groups} {rest})"


def batch_norm(call: CatalogCall) -> Rule:
    """With running statistics everything splits; with those of the batch only the channels."""
    batch = call.attrs.get("training", call.attrs.get("train", True))
    return channel_norm(call, set() if not batch else {0, *range(2, len(call.inputs[0]))})


def instance_norm(call: CatalogCall) -> Rule:
    """Rows and channels split where their own statistics are used; else as batch_norm."""
    if not call.attrs["use_input_stats"]:
        return channel_norm(call, set())
    statistics = call.has("running_mean")
    dims = set(range(2, len(call.inputs[0])))
    return channel_norm(call, dims | ({0} if statistics else set()))


def channel_norm(call: CatalogCall, mixed: set[int]) -> Rule:
    """Vectors of a value a channel go with the first input; ``mixed`` dimensions stay whole."""
    shape = call.inputs[0]
    names = whole(named(shape), mixed)
    vectors = [[names[1]]] * (len(call.inputs) - 1)
    made = [
        [names[1] if size == shape[1] else str(size) for size in output]
        for output in call.outputs[1:]
    ]
    return Rule(text([names, *vectors], [names, *made]))


# --- convolution and pooling --------------------------------------------------------------------


def convolution(call: CatalogCall) -> Rule:
    """Rows and channels split: the inputs' by terms of a sum, or channels by their groups.

    Places split where windows touch without overlap, as for patches.
    """
    image, kernel = call.inputs[0], call.inputs[1]
    spatial, transposed = len(kernel) - 2, "transpose" in call.op or call.attrs.get("transposed")
    groups = int(call.attrs["groups"])
    rows = named(image[: len(image) - spatial - 1], without="cog")
    patches = [] if transposed else patch_dims(call, spatial)
    places = [f"({name} {size})" if size > 1 else name for name, size in patches] or [
        str(size) for size in image[-spatial:]
    ]
    made = [name for name, _ in patches] or [str(size) for size in call.outputs[0][-spatial:]]
    taps = [str(size) for size in kernel[2:]]
    if groups == 1:
        ins, outs = channel("c+", image[-spatial - 1]), channel("o", call.outputs[0][-spatial - 1])
        weight = [ins, outs] if transposed else [outs, ins]
    else:
        each = [image[-spatial - 1] // groups, call.outputs[0][-spatial - 1] // groups]
        ins, outs = (bracket("g", groups, str(size)) for size in each)
        weight = [ins, str(each[1])] if transposed else [outs, str(each[0])]
    inputs = [[*rows, ins, *places], [*weight, *taps]] + [[outs]] * call.has("bias")
    biased = call.has("bias")
    return Rule(
        text(inputs, [[*rows, outs, *made]]),
        lengths={"g": groups} if groups > 1 else {},
        terms=frozenset({2} if biased else ()),
        optional={2: "bias"} if biased else {},
        attrs=(lambda local: {"groups": local.lengths["g"]}) if groups > 1 else None,
        linear=((0, 2), (1, 2)) if biased else ((0,), (1,)),
    )


def channel(name: str, size: int) -> str:
    """A dimension of channels; a single one is not split."""
    return name if size > 1 else "1"


def patch_dims(call: CatalogCall, spatial: int) -> list[tuple[str, int]]:
    """Names of the places and the sizes of their patches; empty where windows overlap or miss."""
    taps = call.inputs[1][2:]
    places = call.inputs[0][-spatial:]
    strides = [*call.attrs["stride"]] * (spatial if len(call.attrs["stride"]) == 1 else 1)
    unpadded = call.attrs["padding"] in ([0] * spatial, [0], "valid")
    dense = all(amount == 1 for amount in call.attrs["dilation"])
    fits = all(
        size == stride and place % size == 0
        for size, stride, place in zip(taps, strides, places, strict=True)
    )
    if not (unpadded and dense and fits):
        return []
    return [(f"p{i}", size) for i, size in enumerate(taps)]


CONVOLUTION = 0.75
"""The efficiency of convolutions; from times of a CPU core."""


def convolution_flops(call: CatalogCall) -> int:
    """Each element of the output is a sum over a window."""
    return 2 * math.prod(call.outputs[0]) * math.prod(call.inputs[1][1:])


def transposed_flops(call: CatalogCall) -> int:
    """Each element of the input is added to a window."""
    return 2 * math.prod(call.inputs[0]) * math.prod(call.inputs[1][1:])


def convolution_backward_flops(call: CatalogCall) -> int:
    """A convolution as large as the forward for each gradient but that of the bias."""
    gradients = sum(len(shape) > 1 for shape in call.outputs)
    return gradients * 2 * math.prod(call.inputs[0]) * math.prod(call.inputs[2][1:])


def over_places(spatial: int) -> SplitRule:
    """A rule for pooling and resizing: all but the last ``spatial`` dimensions split."""

    def rule(call: CatalogCall) -> Rule:
        rank = len(call.inputs[0])
        return along(call, range(rank - spatial, rank))

    return rule


def grid_sampler(call: CatalogCall) -> Rule:
    """Points of an image: rows, channels and points split."""
    image, grid = call.inputs
    spatial = len(image) - 2
    points = [f"p{i}" if size > 1 else "1" for i, size in enumerate(grid[1:-1])]
    rows = channel("n", image[0])
    inputs: list[Dims] = [
        [rows, channel("c", image[1]), *map(str, image[2:])],
        [rows, *points, str(spatial)],
    ]
    return Rule(text(inputs, [[rows, channel("c", image[1]), *points]]))


# --- recurrence ---------------------------------------------------------------------------------


def recurrent(states: int) -> SplitRule:
    """A rule for lstm, gru and rnn over sequences: sequences of the batch split."""

    def rule(call: CatalogCall) -> Rule | None:
        attrs = call.attrs
        if len(call.inputs[0]) != 3 or (attrs["train"] and attrs["dropout"] > 0):
            return None  # one sequence, or random numbers
        outside = 0 if attrs["batch_first"] else 1

        def batched(shape: tuple[int, ...], place: int) -> Dims:
            names = numbers(shape)
            return [*names[:place], channel("n", shape[place]), *names[place + 1 :]]

        state_inputs = call.inputs[1 : 1 + states]
        weights = map(numbers, call.inputs[1 + states :])
        inputs = [batched(call.inputs[0], outside), *(batched(s, 1) for s in state_inputs)]
        outputs = [batched(call.outputs[0], outside), *(batched(s, 1) for s in call.outputs[1:])]
        return Rule(text([*inputs, *weights], outputs))

    return rule


ROWS: Mapping[str, OperatorRow] = {
    **table(
        layer_norm,
        "layer_norm native_layer_norm rms_norm",
        elements=80,
        backward_elements=160,
    ),
    **table(None, "_fused_rms_norm", elements=80, backward_elements=160),
    **table(None, "native_layer_norm_backward _fused_rms_norm_backward", elements=160),
    **table(group_norm, "group_norm"),
    **table(
        batch_norm,
        """
        batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
        """,
    ),
    **table(instance_norm, "instance_norm"),
    **table(
        convolution,
        """
        conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding convolution
        """,
        flops=convolution_flops,
        efficiency=CONVOLUTION,
    ),
    **table(
        convolution,
        "conv_transpose1d conv_transpose2d.input conv_transpose3d.input",
        flops=transposed_flops,
        efficiency=CONVOLUTION,
    ),
    **table(
        None,
        "convolution_backward",
        flops=convolution_backward_flops,
        efficiency=CONVOLUTION,
    ),
    **table(
        over_places(1),
        """
        max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d.vec
        upsample_nearest1d _upsample_nearest_exact1d.vec upsample_linear1d.vec reflection_pad1d
        replication_pad1d
        """,
    ),
    **table(
        over_places(2),
        """
        max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d
        upsample_nearest2d.vec upsample_nearest2d _upsample_nearest_exact2d.vec
        upsample_bilinear2d.vec upsample_bilinear2d upsample_bicubic2d.vec
        _upsample_bilinear2d_aa.vec reflection_pad2d replication_pad2d
        """,
    ),
    **table(
        over_places(3),
        """
        max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d
        upsample_nearest3d.vec upsample_nearest3d _upsample_nearest_exact3d.vec
        upsample_trilinear3d.vec reflection_pad3d replication_pad3d
        """,
    ),
    **table(grid_sampler, "grid_sampler"),
    **table(recurrent(2), "lstm.input"),
    **table(recurrent(1), "gru.input rnn_tanh.input rnn_relu.input"),
}
