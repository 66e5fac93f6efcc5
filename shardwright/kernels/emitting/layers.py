"""Emitters of softmax, norms, losses and embeddings, with their gradients."""

from __future__ import annotations

from typing import Any

from shardwright.kernels.emitting.call import Emission, Emitter, NodeCall, Table
from shardwright.kernels.lowered import ABSENT


def _softmax(log: int) -> Emitter:
    def emit(call: NodeCall) -> Emission:
        x, made = call.of(0), call.of(call.made[0])
        if not x.is_float or made.dtype != x.dtype or not x.shape:
            return None
        return [call.emit("softmax", [0], dim=call.arguments["dim"] % len(x.shape), log=log)]

    return emit


def _softmax_backward(log: int) -> Emitter:
    def emit(call: NodeCall) -> Emission:
        dy, y = call.arguments["grad_output"], call.arguments["output"]
        found = {call.of(place).dtype for place in (dy, y, call.made[0])}
        if len(found) != 1 or not call.of(y).shape:
            return None
        dim = call.arguments["dim"] % len(call.of(y).shape)
        return [call.emit("softmax_bwd", [dy, y], dim=dim, log=log)]

    return emit


# --- norms -----------------------------------------------------------------------------------


def _layer_norm(call: NodeCall) -> Emission:
    given = call.arguments
    dims, eps = len(given["normalized_shape"]), float(given["eps"])
    found = {call.of(p).dtype for p in range(call.n_inputs)}
    if len(found) != 1:
        return None
    outputs = [call.results[0], *call.wanted[1:], ABSENT, ABSENT][:3]
    inputs = [given[name] for name in ("input", "weight", "bias")]
    return [call.emit("layer_norm", inputs, outputs, dims=dims, eps=eps)]


def _layer_norm_backward(call: NodeCall) -> Emission:
    given = call.arguments
    names = ("grad_out", "input", "mean", "rstd", "weight", "bias")
    inputs = [given[name] for name in names]
    if len({call.of(p).dtype for p in inputs if p is not None}) != 1:
        return None
    dims = len(given["normalized_shape"])
    return [call.emit("layer_norm_bwd", inputs, call.wanted, dims=dims)]


def _batch_norm(call: NodeCall) -> Emission:
    """Batch norm; one that renews running statistics has them among its results."""
    given = call.arguments
    training = bool(given.get("training", False))
    running = [given.get("running_mean"), given.get("running_var")]
    if training and running[0] is not None and len(call.results) < 5:
        return None
    if not training and (running[0] is None or (len(call.results) == 3 and _saves(call))):
        return None
    inputs = [*(given[name] for name in ("input", "weight", "bias")), *running]
    if len({call.of(p).dtype for p in inputs if p is not None}) != 1:
        return None
    outputs = [call.results[0], *call.wanted[1:], *[ABSENT] * 4][:5]
    if not training and any(place != ABSENT for place in outputs[1:]):
        return None
    momentum, eps = float(given.get("momentum", 0.1)), float(given["eps"])
    return [
        call.emit("batch_norm", inputs, outputs, training=int(training), momentum=momentum, eps=eps)
    ]


def _saves(call: NodeCall) -> bool:
    return any(place != ABSENT for place in call.wanted[1:])


def _batch_norm_backward(call: NodeCall) -> Emission:
    given = call.arguments
    names = ("input", "weight", "running_mean", "running_var", "save_mean", "save_invstd")
    inputs = [given["grad_out"], *(given[name] for name in names)]
    if len({call.of(p).dtype for p in inputs if p is not None}) != 1:
        return None
    if not given["train"]:
        inputs[-2:] = [None, None]
    attrs = {"training": int(given["train"]), "eps": float(given["eps"])}
    return [call.emit("batch_norm_bwd", inputs, call.wanted, **attrs)]


# --- losses and embeddings -------------------------------------------------------------------


def _cross_entropy(call: NodeCall) -> Emission:
    given = call.arguments
    inputs = [given[name] for name in ("x", "target", "weight")]
    return [call.emit("cross_entropy", inputs, **_reduction(given))]


def _cross_entropy_backward(call: NodeCall) -> Emission:
    given = call.arguments
    names = ("dloss", "log_probs", "target", "total_weight", "weight")
    inputs = [given[name] for name in names]
    return [call.emit("cross_entropy_bwd", inputs, **_reduction(given))]


def _reduction(given: dict[str, Any]) -> dict[str, Any]:
    return {"reduction": given["reduction"], "ignore": given["ignore"]}


def _embedding(call: NodeCall) -> Emission:
    given = call.arguments
    if given["sparse"] or given["scale_grad_by_freq"] or len(call.of(given["weight"]).shape) != 2:
        return None
    return [call.emit("embedding", [given["weight"], given["indices"]])]


def _embedding_backward(call: NodeCall) -> Emission:
    given = call.arguments
    if given["scale_grad_by_freq"]:
        return None
    inputs = [given["grad_output"], given["indices"]]
    return [call.emit("embedding_bwd", inputs, padding=given["padding_idx"])]


TABLE: Table = {
    "aten._softmax.default": _softmax(log=0),
    "aten._log_softmax.default": _softmax(log=1),
    "aten.softmax.int": _softmax(log=0),
    "aten.log_softmax.int": _softmax(log=1),
    "aten._softmax_backward_data.default": _softmax_backward(log=0),
    "aten._log_softmax_backward_data.default": _softmax_backward(log=1),
    "aten.native_layer_norm.default": _layer_norm,
    "aten.layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "shardwright.cross_entropy.default": _cross_entropy,
    "shardwright.cross_entropy_bwd.default": _cross_entropy_backward,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
}
