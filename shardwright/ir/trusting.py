"""Calls whose kernels read and write as far as some argument says: what must hold of the others.

`TRUSTED` has a row an operator. Kernels of backwards trust that what a forward has saved is as the
forward makes it: `check_shapes` takes a call on values without contents, asks the forward, on fake
tensors, and refuses a call on anything else. Strides, lists of an optimizer's step and halves of
spectra are held to shapes. Indices, which only a run knows, are held to their bounds by
`ir.overloads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import GraphError
from shardwright.ir.inference import Inference
from shardwright.ir.operators import named_arguments, resolve
from shardwright.ir.saved_tensors import Arguments, SavedTensors, need_flat, unlike
from shardwright.ir.tensor_meta import contiguous_strides, strides_or_none, tensor_text, torch_dtype
from shardwright.ir.values import IRValue
from shardwright.torch_internals import OpOverload, operator_of, schema_of


def check_shapes(
    op: str, inputs: Sequence[IRValue], attrs: Mapping[str, Any], inference: Inference
) -> None:
    """Raise GraphError where a call is on tensors that its kernel would read or write beyond."""
    row = TRUSTED.get(op.split(".")[1]) if op.startswith("aten.") else None
    if row is None or row.shapes is None:
        return
    try:
        row.shapes(named_arguments(resolve(op), inputs, dict(attrs)), inference)
    except _NOT_AS_CAPTURED as error:
        raise GraphError(
            f"has other arguments than capture gives {op}, which a kernel would trust: {error!r}"
        ) from None


_NOT_AS_CAPTURED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What looking at a number in a tensor's place comes to, or at a dimension that is not there."""


def read_alike(overload: OpOverload) -> Sequence[str]:
    """The arguments that a kernel reads all in one memory order: that of the last one."""
    row = trusted(overload)
    return row.shapes.alike if row is not None and isinstance(row.shapes, SavedTensors) else ()


def trusted(overload: OpOverload) -> TrustedArguments | None:
    """What an operator trusts; None where it looks at its arguments itself."""
    return TRUSTED.get(operator_of(overload)) if overload.namespace == "aten" else None


@dataclass(frozen=True, slots=True)
class IndexBounds:
    """An argument that holds indices, the range that they are from, and one that is skipped."""

    indices: str
    low: int
    end: Callable[[Arguments], int]
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class TrustedArguments:
    """What must hold of an operator's arguments: of their shapes, and of indices among them."""

    shapes: Callable[[Arguments, Inference], None] | None = None
    indices: IndexBounds | None = None


def _need(value: Any, name: str, shape: Sequence[int]) -> None:
    if isinstance(value, IRValue) and value.shape != tuple(shape):
        raise unlike(name, value, shape)


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_POOL = _same("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
_NLL = _same("self", "target", "weight", "reduction", "ignore_index")


def _last(dims: int) -> Callable[[Arguments], Any]:
    return lambda call: list(call["grad_output"].shape[-dims:])


def _embedding_dense_backward(call: Arguments, _: Inference) -> None:
    grad, indices = call["grad_output"], call["indices"]
    _need(grad, "grad_output", (*indices.shape, *grad.shape[-1:]))


def _recurrent(call: Arguments, _: Inference) -> None:
    """Weights of every layer and direction, and of an LSTM's projection where it has one."""
    cells = call["num_layers"] * (2 if call["bidirectional"] else 1)
    each = 4 if call["has_biases"] else 2
    found = len(call["params"])
    if found not in (cells * each, cells * (each + 1)):
        raise GraphError(f"has {found} weights for {cells} cells of {each} each")


def _batch_norm(call: Arguments, _: Inference) -> None:
    channels = call["input"].shape[1:2]
    for name in ("weight", "bias", "running_mean", "running_var"):
        _need(call.get(name), name, channels)


def _batch_norm_backward(call: Arguments, _: Inference) -> None:
    channels = call["input"].shape[1:2]
    _need(call["grad_out"], "grad_out", call["input"].shape)
    trained = call["train"]
    for name in ("weight", "running_mean", "running_var", "save_mean", "save_invstd"):
        value = call.get(name)
        needed = name == "weight" or name.startswith("save" if trained else "running")
        if value is not None and (needed or math.prod(value.shape)):
            _need(value, name, channels)
            need_flat(name, value)
        elif value is None and needed and name != "weight":
            raise GraphError(f"has no {name!r}, which its kernel reads")


def _alike(*names: str) -> Callable[[Arguments, Inference], None]:
    """Tensors of one shape."""

    def check(call: Arguments, _: Inference) -> None:
        for name in names[1:]:
            _need(call[name], name, call[names[0]].shape)

    return check


def _attention_mask(call: Arguments, inference: Inference) -> None:
    mask, query, key = call["attn_mask"], call["query"], call["key"]
    if mask is None or len(query.shape) != 4 or len(key.shape) != 4:
        return
    wanted = (*query.shape[:3], key.shape[2])
    shape = (1,) * (4 - len(mask.shape)) + mask.shape
    if len(shape) != 4 or any(
        size not in (1, want) for size, want in zip(shape, wanted, strict=True)
    ):
        raise unlike("attn_mask", mask, wanted)


_ATTENTION = SavedTensors(
    "_scaled_dot_product_flash_attention_for_cpu.default",
    _same("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"),
    ("out", "logsumexp"),
)


def _attention_backward(call: Arguments, inference: Inference) -> None:
    _attention_mask(call, inference)
    _ATTENTION(call, inference)
    _need(call["grad_out"], "grad_out", call["out"].shape)


def _unfold_backward(call: Arguments, _: Inference) -> None:
    sizes, dim, size, step = (call[name] for name in ("input_sizes", "dim", "size", "step"))
    if not -len(sizes) <= dim < max(len(sizes), 1) or step < 1 or size < 0:
        raise GraphError(f"unfolds dimension {dim} of {sizes} in steps of {step}")
    places = [*sizes]
    if places:
        places[dim] = (places[dim] - size) // step + 1
    _need(call["grad_in"], "grad_in", (*places, size))


def _from_half(call: Arguments, _: Inference) -> None:
    """A complex tensor of half the spectrum has as many columns as the result needs."""
    value, dims, size = call["self"], call["dim"], call["last_dim_size"]
    if dims and -len(value.shape) <= dims[-1] < len(value.shape):
        wanted = [*value.shape]
        wanted[dims[-1]] = size // 2 + 1
        _need(value, "self", wanted)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _by_strides(call: Arguments, _: Inference) -> None:
    value, shape, strides = call["self"], call["size"], call["stride"]
    offset = call["storage_offset"] or 0
    inside = (
        len(shape) == len(strides)
        and min([*shape, *strides, offset], default=0) >= 0
        and offset + _span(shape, strides) <= _span(value.shape, value.meta.full_strides)
    )
    if not inside:
        raise GraphError(
            f"takes {list(shape)} by strides {list(strides)} from element {offset}, which is not "
            f"inside {tensor_text(value.dtype, value.shape)}"
        )


def _scaled(call: Arguments, _: Inference) -> None:
    """Scales, where they are given, are those of the sizes: filters reach as far as they say."""
    taken = call["input_size"] if "input_size" in call else call["self"].shape
    scales = (call.get("scales_h"), call.get("scales_w"))
    for size, made, scale in zip(taken[-2:], call["output_size"], scales, strict=False):
        if scale is not None and not (scale > 0 and math.floor(size * scale) == made):
            raise GraphError(f"scales {size} by {scale} to {made}, not to {size * scale}")


_OF_DISTANCES = str(schema_of(resolve("aten._cdist_backward.default")).arguments[0].name)
"""``grad``, and in torch 2.15 ``grad_output``."""
_DISTANCES = SavedTensors(
    "_cdist_forward.default",
    _same("x1", "x2", "p"),
    (_OF_DISTANCES,),
    (_OF_DISTANCES, "cdist", "x1", "x2"),
    {"compute_mode": lambda _: None},
)


def _distances_backward(call: Arguments, inference: Inference) -> None:
    _DISTANCES(call, inference)
    _need(call["cdist"], "cdist", call[_OF_DISTANCES].shape)
    for name in ("x2", _OF_DISTANCES, "cdist"):
        if call[name].dtype != call["x1"].dtype:
            raise GraphError(
                f"has {call[name].dtype} for the argument {name!r}, x1 is {call['x1'].dtype}"
            )


def _floats(call: Arguments, _: Inference) -> None:
    """Gradients are of floating-point numbers: dividing whole ones may end the process."""
    for name in ("grad_output", "self", "target"):
        if not _has_gradient(call[name]):
            raise GraphError(f"has {call[name].dtype} for the argument {name!r}, not floats")


def _has_gradient(value: IRValue) -> bool:
    """Whether a tensor's numbers are such as gradients are of."""
    dtype = torch_dtype(value.dtype)
    return dtype.is_floating_point or dtype.is_complex


def _copied(call: Arguments, _: Inference) -> None:
    """As many sources as targets."""
    if len(call["src"]) != len(call["self"]):
        raise GraphError(f"has {len(call['src'])} sources for {len(call['self'])} tensors")


def _fused(call: Arguments, _: Inference) -> None:
    """The lists of an optimizer's step go together, through memory that lies alike."""
    lists = {name: item for name, item in call.items() if isinstance(item, list)}
    spared = {name for name, option in _OPTIONAL.items() if not call.get(option)}
    parameters = lists["self"]
    for name, values in lists.items():
        if len(values) != len(parameters) and (values or name not in spared):
            raise GraphError(f"has {len(values)} {name} for {len(parameters)} parameters")
        for parameter, value in zip(parameters, values, strict=False):
            _need(value, name, () if name == "state_steps" else parameter.shape)
            if name != "state_steps":
                _need_alike(name, value, parameter)
    for name in ("lr", "grad_scale", "found_inf"):
        _need(call.get(name), name, ())


_OPTIONAL = {"max_exp_avg_sqs": "amsgrad", "momentum_buffer_list": "momentum"}
"""Lists that may be empty where an option is off."""


def _need_alike(name: str, value: IRValue, parameter: IRValue) -> None:
    """A tensor lies as the parameter does, without gaps."""
    found, wanted = (
        strides_or_none(item.shape, item.strides) or contiguous_strides(item.shape)
        for item in (value, parameter)
    )
    if found != wanted or _span(value.shape, found) != math.prod(value.shape):
        raise GraphError(
            f"has a tensor of strides {list(found)} among {name}, the parameter's are "
            f"{list(wanted)}; its kernel goes through memory without gaps"
        )


def _pieces(count: Callable[[Arguments], int]) -> Callable[[Arguments, Inference], None]:
    """As many tensors come out of a cut as a file can write."""

    def check(call: Arguments, _: Inference) -> None:
        if count(call) > _MOST_PIECES:
            raise GraphError(f"makes {count(call)} tensors; at most {_MOST_PIECES} can be written")

    return check


_MOST_PIECES = 1 << 16


def _size(call: Arguments) -> int:
    shape, dim = call["self"].shape, call["dim"]
    return shape[dim] if -len(shape) <= dim < len(shape) else 0


def _splits(call: Arguments) -> int:
    each = call.get("split_size")
    return -(-_size(call) // each) if isinstance(each, int) and each > 0 else 1


def _number(name: str) -> Callable[[Arguments], int]:
    return lambda call: call[name] if isinstance(call.get(name), int) else 0


def _cells(dims: int) -> IndexBounds:
    """Indices of the elements of the last dimensions."""
    return IndexBounds("indices", 0, lambda call: math.prod(call["self"].shape[-dims:]))


def _classes(call: Arguments) -> int:
    shape: Sequence[int] = call["self"].shape
    return shape[1] if len(shape) > 1 else shape[0]


_SHAPES: dict[str, Callable[[Arguments, Inference], None]] = {
    **{
        f"_adaptive_avg_pool{n}d_backward": SavedTensors(
            f"_adaptive_avg_pool{n}d.default",
            _same("self"),
            ("grad_output",),
            given={"output_size": _last(n)},
        )
        for n in (2, 3)
    },
    **{
        f"grid_sampler_{n}d_backward": SavedTensors(
            f"grid_sampler_{n}d.default",
            _same("input", "grid", "interpolation_mode", "padding_mode", "align_corners"),
            ("grad_output",),
        )
        for n in (2, 3)
    },
    "native_layer_norm_backward": SavedTensors(
        "native_layer_norm.default",
        _same("input", "normalized_shape", "weight", "bias"),
        ("grad_out", "mean", "rstd"),
        ("mean", "rstd"),
        {"eps": lambda _: 1e-5},
    ),
    "_fused_rms_norm_backward": SavedTensors(
        "_fused_rms_norm.default",
        _same("input", "normalized_shape", "weight"),
        ("grad_out", "rstd"),
        ("rstd",),
        {"eps": lambda _: 1e-5},
    ),
    "native_group_norm_backward": SavedTensors(
        "native_group_norm.default",
        _same("input", "weight", "N", "C", "HxW", "group"),
        ("grad_out", "mean", "rstd"),
        ("mean", "rstd"),
        {"bias": lambda _: None, "eps": lambda _: 1e-5},
        ("grad_out", "input"),
    ),
    "convolution_backward": SavedTensors(
        "convolution.default",
        _same(
            *("input", "weight", "stride", "padding", "dilation", "transposed", "output_padding"),
            "groups",
        ),
        ("grad_output",),
        given={"bias": lambda _: None},
    ),
    "_cdist_backward": _distances_backward,
    "_weight_norm_interface_backward": SavedTensors(
        "_weight_norm_interface.default",
        {"v": "saved_v", "g": "saved_g", "dim": "dim"},
        ("grad_w", "saved_norms"),
    ),
    "glu_backward": SavedTensors("glu.default", _same("self", "dim"), ("grad_output",)),
    **dict.fromkeys(
        (
            *("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"),
            *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
        ),
        _batch_norm,
    ),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "native_batch_norm_backward": _batch_norm_backward,
    "_softmax_backward_data": _alike("grad_output", "output"),
    "_log_softmax_backward_data": _alike("grad_output", "output"),
    "_scaled_dot_product_flash_attention_for_cpu": _attention_mask,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_foreach_copy": _copied,
    "smooth_l1_loss_backward": _floats,
    "huber_loss_backward": _floats,
    **{
        f"_upsample_{kind}2d_aa{end}": _scaled
        for kind in ("bilinear", "bicubic")
        for end in ("", "_backward")
    },
    "unfold_backward": _unfold_backward,
    "_fft_c2r": _from_half,
    "as_strided": _by_strides,
    "as_strided_copy": _by_strides,
    "as_strided_scatter": _by_strides,
    **{f"_fused_{name}": _fused for name in ("adagrad", "adam", "adamw", "sgd")},
    **{name: _pieces(_size) for name in ("unbind", "unbind_copy")},
    **{name: _pieces(_splits) for name in ("split", "split_copy", "unsafe_split")},
    **{name: _pieces(_number("chunks")) for name in ("chunk", "unsafe_chunk")},
    **{
        name: _pieces(_number("sections"))
        for name in ("tensor_split", "hsplit", "vsplit", "dsplit")
    },
}
"""Of operators that trust shapes alone."""

TRUSTED: Mapping[str, TrustedArguments] = {
    **{name: TrustedArguments(rule) for name, rule in _SHAPES.items()},
    **{
        f"max_pool{n}d_with_indices_backward": TrustedArguments(
            SavedTensors(f"max_pool{n}d_with_indices.default", _POOL, ("grad_output", "indices")),
            _cells(n),
        )
        for n in (2, 3)
    },
    **{
        f"adaptive_max_pool{n}d_backward": TrustedArguments(
            SavedTensors(
                f"adaptive_max_pool{n}d.default",
                _same("self"),
                ("grad_output", "indices"),
                given={"output_size": _last(n)},
            ),
            _cells(n),
        )
        for n in (2, 3)
    },
    **{
        f"{name}_backward": TrustedArguments(
            SavedTensors(f"{name}_forward.default", _NLL, ("grad_output", "total_weight")),
            IndexBounds("target", 0, _classes, "ignore_index"),
        )
        for name in ("nll_loss", "nll_loss2d")
    },
    "embedding_dense_backward": TrustedArguments(
        _embedding_dense_backward,
        IndexBounds("indices", 0, lambda call: call["num_weights"], "padding_idx"),
    ),
    "linalg_lu_solve": TrustedArguments(
        indices=IndexBounds("pivots", 1, lambda call: call["LU"].shape[-1] + 1)
    ),
    "lu_unpack": TrustedArguments(
        indices=IndexBounds("LU_pivots", 1, lambda call: call["LU_data"].shape[-2] + 1)
    ),
}
"""By the operator's name: what must hold of its arguments."""
