"""Whole layers of torch.nn: a module whose nodes are exactly what one of them does.

The layer, made and called so, is captured as the very nodes. A layer that has parameters is found
by its operator and their names; one that has none only where the module's class is known, since
nothing else of it is left in a graph. A class of the model's own is never taken for one of torch's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.codegenerate.writing.layer_rows import (
    AFFINE,
    BROADCAST_LOSSES,
    KINDS,
    MODE_FLAGS,
    STATISTICS,
    Kind,
    Part,
    affine,
    statistical,
)
from shardwright.ir import IRGraph, IRNode, IRValue, Scope
from shardwright.ir.tensor_meta import torch_dtype


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of torch.nn.

    constructor
        ``nn.LayerNorm(768)``.
    arguments, results
        Value ids of its call, in order.
    parameters
        Its parameters and buffers: the name in the layer, and the stored value's id.
    """

    constructor: str
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    parameters: Mapping[str, int]


def find_layer(
    graph: IRGraph,
    nodes: Sequence[IRNode],
    scope: Scope | None,
    names: Mapping[int, str],
    *,
    training: bool,
) -> Layer | None:
    """The layer whose one call is ``nodes``, in order.

    scope
        The module's path and class; None, or class ``""``, where they are not known.
    names
        The full path of every stored value, ``h.0.ln_1.weight``.
    training
        The mode of the whole model. What was called in another mode is no layer, which would go by
        the model's.
    """
    if not all(_follows(Part.of(node, graph.values), training) for node in nodes):
        return None
    module = _Module(graph, nodes, scope, names)
    if tuple(node.op for node in nodes) == _TRAINED_NORM:
        return _batch_norm_in_training(module)
    if [node.op for node in nodes[:-1]] == ["aten.broadcast_tensors.default"]:
        return _broadcast_loss(module)
    if len(nodes) != 1:
        return None
    part = Part.of(nodes[0], graph.values)
    fits = (_fit(module, kind, part) for kind in _KINDS[part.node.op] if module.may_be(kind.cls))
    return next((layer for layer in fits if layer is not None), None)


def _follows(part: Part, training: bool) -> bool:
    """Whether a call's flag of training, if it goes by one, is the model's."""
    if STATISTICS[0] in part.arguments and not part.has(STATISTICS[0]):
        return True  # without statistics of its own it does one thing in both modes
    said = [part.arguments[name] for name in MODE_FLAGS if name in part.arguments]
    return all(flag == training for flag in said)


_KINDS: Mapping[str, list[Kind]] = defaultdict(list)
for _kind in KINDS:
    _KINDS[_kind.op].append(_kind)


@dataclass(frozen=True, slots=True)
class _Module:
    graph: IRGraph
    nodes: Sequence[IRNode]
    scope: Scope | None
    names: Mapping[int, str]

    @property
    def cls(self) -> str:
        return self.scope.cls if self.scope is not None else ""

    def may_be(self, cls: str) -> bool:
        """Whether the module's class is, or is not known not to be, a layer's."""
        return not self.cls or (
            self.cls.startswith("torch.nn.modules.") and self.cls.rpartition(".")[2] == cls
        )

    def owns(self, values: Mapping[str, IRValue]) -> bool:
        """Whether the values are stored, each in this module under its name."""
        if self.scope is not None:
            return all(
                f"{self.scope.path}.{name}".lstrip(".") in self._paths(value)
                for name, value in values.items()
            )
        prefixes = [
            {path.removesuffix(name) for path in self._paths(value) if _ends(path, name)}
            for name, value in values.items()
        ]
        return bool(set.intersection(*prefixes)) if prefixes else True

    def _paths(self, value: IRValue) -> Iterable[str]:
        if not value.is_stored:
            return ()
        path = self.names.get(value.id)
        return (*value.names, path) if path else value.names


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _fit(module: _Module, kind: Kind, part: Part) -> Layer | None:
    """The one node as a layer of this kind."""
    own = {name: part.arguments[name] for name in kind.own if part.has(name)}
    if not module.owns(own) or (not module.cls and not own):
        return None
    texts = kind.write(part)
    if texts is None:
        return None
    arguments = tuple(
        value.id
        for name, value in part.arguments.items()
        if isinstance(value, IRValue) and name not in own
    )
    return _layer(kind.cls, texts, arguments, tuple(part.node.outputs), own)


def _layer(
    cls: str,
    texts: list[str],
    arguments: tuple[int, ...],
    results: tuple[int, ...],
    own: Mapping[str, IRValue],
) -> Layer | None:
    """The layer with its dtype; None where its parameters are of several."""
    dtypes = {value.dtype for value in own.values() if torch_dtype(value.dtype).is_floating_point}
    if len(dtypes) > 1:
        return None
    said = [f"dtype={torch_dtype(dtype)}" for dtype in dtypes if dtype != "f32"]
    parameters = {name: value.id for name, value in own.items()}
    return Layer(f"nn.{cls}({', '.join(texts + said)})", arguments, results, parameters)


def _broadcast_loss(module: _Module) -> Layer | None:
    """A loss of two tensors that are broadcast for it alone."""
    broadcast, last = module.nodes
    kind = BROADCAST_LOSSES.get(last.op)
    if kind is None or not module.cls or not module.may_be(kind.cls):
        return None
    alone = not any(
        module.graph.values[i].users != [last.id] or i in module.graph.outputs
        for i in broadcast.outputs
    )
    texts = kind.write(Part.of(last, module.graph.values))
    if texts is None or not alone or last.inputs != broadcast.outputs:
        return None
    return _layer(kind.cls, texts, tuple(broadcast.inputs), tuple(last.outputs), {})


# --- batch norm in training ---------------------------------------------------------------------

_TRAINED_NORM = ("aten.add.Tensor", "aten._native_batch_norm_legit_functional.default")
_BY_RANK = {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d", 5: "BatchNorm3d"}


def _batch_norm_in_training(module: _Module) -> Layer | None:
    """It counts the batches and moves its statistics, which the graph has as updates."""
    values = module.graph.values
    count, norm = (Part.of(node, values) for node in module.nodes)
    tracked = count.arguments["self"]
    own = {name: norm.arguments[name] for name in AFFINE + STATISTICS if norm.has(name)}
    own["num_batches_tracked"] = tracked
    cls = _BY_RANK.get(len(norm.shape("input")), "")
    if not (cls and module.may_be(cls) and STATISTICS[0] in own and module.owns(own)):
        return None
    if not (count.node.attrs == {"other": 1, "alpha": 1} and norm.arguments["training"]):
        return None
    result, *saved = norm.node.outputs
    if not _only_updates(module.graph, own, count.node.outputs[0], saved):
        return None
    texts = statistical(norm, True, affine(norm), [])
    argument = norm.arguments["input"].id
    return None if texts is None else _layer(cls, texts, (argument,), (result,), own)


def _only_updates(
    graph: IRGraph, own: Mapping[str, IRValue], counted: int, saved: Sequence[int]
) -> bool:
    """Whether what a norm makes beside its result is nothing but its buffers' new contents."""
    _, _, new_mean, new_var = saved
    new = {"num_batches_tracked": counted, "running_mean": new_mean, "running_var": new_var}
    updated = all(graph.updates.get(own[name].id) == made for name, made in new.items())
    beside = (counted, *saved)
    return updated and not any(graph.values[i].users or i in graph.outputs for i in beside)
