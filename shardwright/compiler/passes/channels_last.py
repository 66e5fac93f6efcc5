"""Channels-last layout, wherever a graph of inference convolves.

Two-dimensional convolutions read and make tensors with their channels last, and what can go on so
(elementwise operators, norms, pools, views) does. At a border to an operator that wants another
order there is one copy of a value, between convolutions none. Inputs and outputs of the graph keep
their layouts; a graph that is a step of training stays as it is.

A value's new layout is not chosen but inferred: each operator runs on fake tensors with its inputs'
present strides, and its result has those that torch then gives it. Where one channel or one pixel
leaves open which order a tensor is in, torch goes by the strides of such dimensions; so they are
kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwright.compiler.passes.rewriter import Rewriter, same_layout
from shardwright.errors import GraphError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.operators import is_marker, resolve
from shardwright.ir.overloads import BY_STRIDES
from shardwright.ir.tensor_meta import TensorMeta, contiguous_strides

CONVOLUTIONS = frozenset(
    {
        "aten.conv2d.default",
        "aten.conv2d.padding",
        "aten.convolution.default",
        "shardwright.conv.default",
    }
)

_NORMS_AND_POOLS = (
    "batch_norm.default",
    "native_batch_norm.default",
    "_native_batch_norm_legit_no_training.default",
    "group_norm.default",
    "native_group_norm.default",
    "max_pool2d.default",
    "max_pool2d_with_indices.default",
    "avg_pool2d.default",
    "adaptive_avg_pool2d.default",
    "_adaptive_avg_pool2d.default",
    "adaptive_max_pool2d.default",
    "upsample_nearest2d.vec",
    "upsample_nearest2d.default",
    "upsample_bilinear2d.vec",
    "upsample_bilinear2d.default",
)
_VIEWS = (
    "permute.default",
    "transpose.int",
    "select.int",
    "slice.Tensor",
    "narrow.default",
    "split.Tensor",
    "split_with_sizes.default",
    "chunk.default",
    "unbind.int",
    "unsqueeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "expand.default",
    "alias.default",
    "detach.default",
    "flatten.using_ints",
    "reshape.default",
    "view.default",
)
_OF_ANY_ORDER = (
    "mean.dim",
    "sum.dim_IntList",
    "amax.default",
    "amin.default",
    "cat.default",
    "constant_pad_nd.default",
    "clone.default",
    "dropout.default",
)
GOING_ON = frozenset(f"aten.{name}" for name in (*_NORMS_AND_POOLS, *_VIEWS, *_OF_ANY_ORDER))
"""Operators beside the elementwise ones that lose nothing by channels that lie last."""

_STRICT_VIEW = "aten.view.default"
"""Of these the one that refuses memory in which it would have to copy."""

_DENSE = frozenset(f"aten.{name}.default" for name in ("group_norm", "native_group_norm"))
"""Of these those whose kernels refuse what is neither contiguous nor lies channels last."""

FEW_CHANNELS = 8
"""Below these, a convolution reads channels that lie first as well as it would read a copy."""


def channels_last(graph: IRGraph) -> IRGraph:
    """The graph with its convolutions in channels-last layout."""
    if not any(node.op in CONVOLUTIONS for node in graph.nodes) or _trains(graph):
        return graph
    return _Pass(graph).run()


def _trains(graph: IRGraph) -> bool:
    return any(is_marker(node.op) or "backward" in node.op for node in graph.nodes)


class _Pass:
    """The graph that is written.

    moved
        By value of the source, the value of the result that holds it in another layout.
    last
        By value of the result, its copy with channels last.
    own
        By value of the source that has moved, its copy in the layout that it had.
    """

    def __init__(self, graph: IRGraph) -> None:
        self.graph = graph
        self.rewriter = Rewriter(graph)
        self.moved: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.own: dict[int, int] = {}

    def run(self) -> IRGraph:
        """Every node in order, then the ends; the graph as it was where these cannot be had."""
        for node in self.graph.nodes:
            if node.op in CONVOLUTIONS and len(self.graph.values[node.inputs[0]].shape) == 4:
                self._convolve(node)
            elif any(value_id in self.moved for value_id in node.inputs):
                self._follow(node)
            else:
                self.rewriter.keep(node)
        for value_id in dict.fromkeys((*self.graph.outputs, *self.graph.updates.values())):
            if not self._ends(value_id, self.graph.nodes[-1]):
                return self.graph
        return self.rewriter.finish()

    # --- nodes ------------------------------------------------------------------------------

    def _convolve(self, node: IRNode) -> None:
        """A convolution on what lies channels last; a residual too."""
        inputs = [self._here(value_id) for value_id in node.inputs]
        x, weight = inputs[:2]
        planes = self._by_planes(x, weight)
        inputs[1] = weight if planes is None else planes
        for place, value_id in enumerate(inputs):
            if place != 1 and len(self._value(value_id).shape) == 4 and (place or planes is None):
                inputs[place] = self._channels_last(value_id, node)
        self._emit(node, inputs)

    def _by_planes(self, x: int, weight: int) -> int | None:
        """The weight in channels-last layout, where that makes the result so without a copy of x.

        That is for few channels, where the weight is stored.
        """
        contents = self.graph.tensors.get(weight)
        value = self._value(x)
        if value.shape[1] >= FEW_CHANNELS or (value.shape[1] > 1 and _is_last(value)):
            return None
        if contents is None or contents.is_meta or weight in self.graph.updates:
            return None
        if weight not in self.last:
            turned = contents.detach().clone(memory_format=torch.channels_last)
            if turned.shape[2:].numel() == 1:  # of these torch cannot tell the order
                return None
            name = f"{self._value(weight).name}.channels_last"
            self.last[weight] = self.rewriter.constant(name, turned)
            value = self._value(self.last[weight])
            value.meta = TensorMeta(value.shape, value.dtype, turned.stride())
        return self.last[weight]

    def _follow(self, node: IRNode) -> None:
        """Another operator on values that have moved: on them as they are, or moved back."""
        inputs = [self._here(value_id) for value_id in node.inputs]
        going = node.op in GOING_ON
        if not going and (going := _is_elementwise(node.op)):
            inputs = self._alike(inputs, node)
        if node.op in _DENSE:
            first = self._value(inputs[0])
            going = first.strides is None or _is_last(first)
        if going and (node.op != _STRICT_VIEW or self._has_view(node, inputs)):
            return self._emit(node, inputs)
        inputs = [self._taken(value_id, node) for value_id in node.inputs]
        if inputs == [self.rewriter.now(value_id) for value_id in node.inputs]:
            return self.rewriter.keep(node)
        self._emit(node, inputs)

    def _has_view(self, node: IRNode, inputs: list[int]) -> bool:
        """Whether the shape that a ``view`` asks for is one of memory as it lies now."""
        values = [self._value(value_id) for value_id in inputs]
        try:
            self.rewriter.inference.outputs(node.op, values, node.attrs)
        except GraphError:
            return False
        return True

    def _alike(self, inputs: list[int], node: IRNode) -> list[int]:
        """Inputs of an elementwise operator, all of the full shape with their channels last."""
        values = [self._value(value_id) for value_id in inputs]
        shape = torch.broadcast_shapes(*(value.shape for value in values))
        images = len(shape) == 4 and shape[1] > 1
        full = [images and value.shape == shape for value in values]
        if not any(whole and _is_last(v) for whole, v in zip(full, values, strict=True)):
            return inputs
        return [
            self._channels_last(value_id, node) if whole else value_id
            for value_id, whole in zip(inputs, full, strict=True)
        ]

    def _emit(self, node: IRNode, inputs: list[int]) -> None:
        """The node on these inputs; what it makes is in its own layout, or has moved."""
        name = self.graph.values[node.outputs[0]].name
        made = self._call(node.op, inputs, node.attrs, node, name)
        for old, new in zip(node.results, made, strict=True):
            if old is not None and new is not None:
                self._stand(old, new)

    def _call(
        self, op: str, inputs: list[int], attrs: Mapping[str, object], node: IRNode, name: str
    ) -> list[int | None]:
        """A call whose results have their strides whole, those of single elements too."""
        made = self.rewriter.call(op, inputs, attrs, node, name)
        values = [self._value(value_id) for value_id in inputs]
        for value_id, tensor in zip(
            made, self.rewriter.inference.outputs(op, values, attrs), strict=True
        ):
            if value_id is not None and tensor is not None:
                value = self._value(value_id)
                strides = _told_strides(value) or tensor.stride()
                plain = strides == contiguous_strides(value.shape)
                value.meta = TensorMeta(value.shape, value.dtype, None if plain else strides)
        return made

    # --- values -----------------------------------------------------------------------------

    def _stand(self, old: int, new: int) -> None:
        """The result's value ``new`` holds the source's ``old``."""
        if self.graph.values[old].meta.full_strides == self._value(new).meta.full_strides:
            self.rewriter.replace(old, new)
        else:
            self.moved[old] = new

    def _value(self, value_id: int) -> IRValue:
        return self.rewriter.of(value_id)

    def _here(self, value_id: int) -> int:
        """The value of the result that holds one of the source."""
        return self.moved.get(value_id, self.rewriter.now(value_id))

    def _channels_last(self, value_id: int, node: IRNode) -> int:
        """The value with channels last: itself, or a copy made once."""
        value = self._value(value_id)
        if _is_last(value):
            return value_id
        if value_id not in self.last:
            attrs = {"memory_format": torch.channels_last}
            self.last[value_id] = self._copied(value_id, attrs, node)
        return self.last[value_id]

    def _taken(self, value_id: int, node: IRNode) -> int:
        """The source's value as any operator takes it: contiguous, or as it was."""
        now = self._here(value_id)
        contiguous = self._value(now).strides is None and node.op not in BY_STRIDES
        if contiguous or same_layout(self.graph.values[value_id], self._value(now)):
            return now
        return self._moved_back(value_id, node)

    def _ends(self, value_id: int, node: IRNode) -> bool:
        """Whether the source's value, which a caller gets, can lie as it did; it does then."""
        if value_id not in self.moved:
            return True
        now = self._taken(value_id, node)
        alike = same_layout(self.graph.values[value_id], self._value(now))
        now = now if alike else self._moved_back(value_id, node)
        if alike := same_layout(self.graph.values[value_id], self._value(now)):
            self.rewriter.replace(value_id, now)
        return alike

    def _moved_back(self, value_id: int, node: IRNode) -> int:
        """The source's value in the layout that it had.

        A copy in the order of the strides that it had, seen through a permutation; so where it
        was not dense, the copy is.
        """
        if value_id not in self.moved:
            return self.rewriter.now(value_id)
        if value_id not in self.own:
            value = self.graph.values[value_id]
            self.own[value_id] = made = self._ordered_copy(value, self.moved[value_id], node)
            if value.meta.full_strides == self._value(made).meta.full_strides:
                self.rewriter.replace(value_id, made)
        return self.own[value_id]

    def _ordered_copy(self, like: IRValue, now: int, node: IRNode) -> int:
        """A copy whose dimensions lie in memory in the order of ``like``'s."""
        steps = like.meta.full_strides
        order = sorted(range(len(steps)), key=lambda dim: (-steps[dim], dim))
        contiguous = {"memory_format": torch.contiguous_format}
        if order == list(range(len(order))):
            return self._copied(now, contiguous, node)
        turned = self._called("aten.permute.default", now, {"dims": order}, node)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        copy = self._copied(turned, contiguous, node)
        return self._called("aten.permute.default", copy, {"dims": inverse}, node)

    def _copied(self, value_id: int, attrs: Mapping[str, object], node: IRNode) -> int:
        return self._called("aten.clone.default", value_id, attrs, node)

    def _called(self, op: str, value_id: int, attrs: Mapping[str, object], node: IRNode) -> int:
        (made,) = self._call(op, [value_id], attrs, node, self._value(value_id).name)
        if made is None:
            raise GraphError(f"{op} made nothing of %{self._value(value_id).name}")
        return made


def _is_last(value: IRValue) -> bool:
    """Whether a value's channels lie last; a single one has to say so by its stride."""
    if len(value.shape) != 4 or value.numel == 0:
        return False
    steps, expected = value.meta.full_strides, 1
    for dim in (1, 3, 2, 0):
        says = value.shape[dim] > 1 or (dim == 1 and value.shape[2:] != (1, 1))
        if says and steps[dim] != expected:
            return False
        expected *= value.shape[dim]
    return True


def _told_strides(value: IRValue) -> tuple[int, ...] | None:
    """Channels-last strides in full, where those of larger dimensions leave no doubt of them."""
    if not _is_last(value) or value.shape[1] == 1 or value.shape[2:] == (1, 1):
        return None
    _, channels, height, width = value.shape
    return channels * height * width, 1, channels * width, channels


def _is_elementwise(op: str) -> bool:
    return torch.Tag.pointwise in resolve(op).tags or op == "shardwright.chain.default"
