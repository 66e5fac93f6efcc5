"""How operators are written: one row an overload, and `spell`, which writes a node's call.

What `spell` gives, captured (`sw.capture`), is a call of the node's very overload with the same
arguments. An overload without a row, and a call that Python's form would make another of, is
written by the overload's own name, ``torch.ops.aten.copy.default(x, y)``. `F.mse_loss` and its kin
expand their operands first, which a graph holds as a call of its own: they have no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from keyword import iskeyword
from typing import Any

import torch

from shardwright.codegenerate.spelling.forms import (
    ALWAYS,
    Mode,
    Operand,
    Row,
    SpelledCall,
    Style,
    arguments,
    attribute,
    first_of,
    function,
    infix,
    method,
    prefix,
    text_of,
    without_parentheses,
    words,
)
from shardwright.ir import IRGraph, IRNode

# --- operators in one of the plain forms ----------------------------------------------------------

INFIX = {
    "floor_divide.default": "//",
    "matmul.default": "@",
    "pow.Tensor_Scalar": "**",
    "pow.Tensor_Tensor": "**",
    "pow.Scalar": "**",
    **dict(zip(words("mul.Tensor div.Tensor add.Tensor sub.Tensor"), "*/+-", strict=True)),
    **{
        f"{name}.{kind}": symbol
        for name, symbol in zip(
            words("remainder __and__ __or__ __xor__ __lshift__ __rshift__ eq ne lt le gt ge"),
            words("% & | ^ << >> == != < <= > >="),
            strict=True,
        )
        for kind in ("Tensor", "Scalar")
    },
}

METHODS = words("""
    abs.default clamp.default clamp.Tensor clamp_min.default clamp_max.default masked_fill.Scalar
    masked_fill.Tensor clone.default type_as.default positive.default detach.default
    to.dtype to.device

    sum.default sum.dim_IntList mean.default mean.dim amax.default amin.default max.default max.dim
    min.default min.dim argmax.default argmin.default prod.default prod.dim_int any.default any.dim
    all.default all.dim var.dim std.dim logsumexp.default cumsum.default cumprod.default
    nansum.default median.default median.dim logcumsumexp.default cummax.default cummin.default
    topk.default sort.default argsort.default kthvalue.default mode.default count_nonzero.default
    count_nonzero.dim_IntList diff.default

    transpose.int expand_as.default squeeze.default squeeze.dim squeeze.dims
    unsqueeze.default movedim.int movedim.intlist swapaxes.default swapdims.default roll.default
    rot90.default narrow.default diagonal.default unfold.default as_strided.default view_as.default
    reshape_as.default t.default repeat_interleave.self_int tril.default triu.default
    diag_embed.default unbind.int chunk.default view.dtype

    index_select.default gather.default scatter.src scatter.value scatter_add.default
    scatter_reduce.two index_add.default index_copy.default index_fill.int_Scalar
    index_fill.int_Tensor masked_scatter.default take_along_dim.default new_full.default
""")
"""``x.name(…)``."""

SPREAD: Mapping[str, str] = {
    "view.default": "size",
    "reshape.default": "shape",
    "permute.default": "dims",
    "expand.default": "size",
    "repeat.default": "repeats",
    "tile.default": "dims",
    "flip.default": "dims",
    **dict.fromkeys(words("new_zeros.default new_ones.default new_empty.default"), "size"),
}
"""``x.name(2, -1)``: methods that take a list as arguments of their own."""

FUNCTIONS = words("""
    exp.default exp2.default expm1.default log.default log2.default log10.default log1p.default
    sqrt.default rsqrt.default square.default reciprocal.default sin.default cos.default tan.default
    asin.default acos.default atan.default sinh.default cosh.default tanh.default asinh.default
    acosh.default atanh.default erf.default erfc.default erfinv.default lgamma.default
    digamma.default sigmoid.default logit.default ceil.default floor.default round.default
    trunc.default frac.default sign.default sgn.default logical_not.default isnan.default
    isinf.default isfinite.default nan_to_num.default real.default imag.default angle.default
    conj_physical.default deg2rad.default rad2deg.default maximum.default minimum.default
    fmax.default fmin.default atan2.default hypot.default polar.default complex.default
    logaddexp.default logaddexp2.default logical_and.default logical_or.default logical_xor.default
    heaviside.default nextafter.default isclose.default addcmul.default addcdiv.default
    round.decimals copysign.Tensor xlogy.Tensor lerp.Scalar lerp.Tensor where.self where.ScalarOther
    where.ScalarSelf where.Scalar div.Tensor_mode fmod.Tensor fmod.Scalar bitwise_and.Tensor
    bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    aminmax.default renorm.default max.other min.other histc.default

    mm.default bmm.default mv.default dot.default inner.default outer.default addmm.default
    addbmm.default baddbmm.default addmv.default addr.default bilinear.default trace.default

    cat.default stack.default hstack.default vstack.default dstack.default column_stack.default
    concat.default concatenate.default view_as_real.default view_as_complex.default kron.default
    slice_scatter.default select_scatter.default diagonal_scatter.default unflatten.int
    pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default
    tensor_split.sections tensor_split.indices take.default searchsorted.Tensor bucketize.Tensor

    full.default eye.default eye.m linspace.default randint.default randint.low randperm.default
    tril_indices.default triu_indices.default scalar_tensor.default
    zeros_like.default ones_like.default full_like.default empty_like.default rand_like.default
    randn_like.default bernoulli.default bernoulli.p multinomial.default poisson.default
    native_layer_norm.default
""")
"""``torch.name(…)``."""

FUNCTIONAL = words("""
    relu.default relu6.default gelu.default silu.default mish.default elu.default selu.default
    celu.default leaky_relu.default hardtanh.default hardswish.default hardsigmoid.default
    softplus.default threshold.default hardshrink.default softshrink.default glu.default
    prelu.default pad.default cosine_similarity.default

    linear.default rms_norm.default conv1d.default conv2d.default conv3d.default
    conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input
    max_pool1d.default max_pool2d.default max_pool3d.default
    avg_pool1d.default avg_pool2d.default avg_pool3d.default
    adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
""")
"""``F.name(…)``."""

POOLS_WITH_INDICES = words("""
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
""")
"""Pools that give the places of the maxima too: ``F.max_pool2d(x, 2, return_indices=True)``."""

LOSSES = {
    "cross_entropy_loss": "cross_entropy",
    "nll_loss_nd": "nll_loss",
    **{
        name: name
        for name in words("""
            binary_cross_entropy binary_cross_entropy_with_logits kl_div hinge_embedding_loss
            soft_margin_loss margin_ranking_loss
        """)
    },
}
REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
"""Reductions are numbers in ATen and words in Python."""

INTERPOLATIONS = {
    **{f"upsample_nearest{n}d.vec": "nearest" for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d.vec": "nearest-exact" for n in (1, 2, 3)},
    "upsample_linear1d.vec": "linear",
    "upsample_bilinear2d.vec": "bilinear",
    "upsample_bicubic2d.vec": "bicubic",
    "upsample_trilinear3d.vec": "trilinear",
    "_upsample_bilinear2d_aa.vec": "bilinear",
    "_upsample_bicubic2d_aa.vec": "bicubic",
}


# --- operators whose form depends on the call -----------------------------------------------------


def contiguous(call: SpelledCall) -> str | None:
    """``x.contiguous()``, which Python does not call on a tensor that is contiguous."""
    return method("contiguous")(call) if call.operand("self").value.strides else None


def arange(call: SpelledCall) -> str | None:
    """``torch.arange(5)``; whole numbers are i64 without being told, a step of 1 is told."""
    ends = [call.arguments.get(name) for name in ("start", "end", "step")]
    whole = all(isinstance(end, int) for end in ends if end is not None)
    defaults = {"step": ALWAYS, **({"dtype": torch.int64} if whole else {})}
    return function("torch.arange", Style(defaults=defaults, front=3))(call)


def einsum(call: SpelledCall) -> str | None:
    """``torch.einsum("ij,jk->ik", x, y)``; of more tensors Python looks for a path itself."""
    tensors = call.arguments["tensors"]
    if len(tensors) > 2 or call.arguments["path"] is not None:
        return None
    return f"torch.einsum({call.text('equation')}, {', '.join(map(text_of, tensors))})"


def tensordot(call: SpelledCall) -> str:
    """``torch.tensordot(x, y, dims=([1], [0]))``."""
    dims = f"({call.arguments['dims_self']}, {call.arguments['dims_other']})"
    return f"torch.tensordot({call.text('self')}, {call.text('other')}, dims={dims})"


def meshgrid(call: SpelledCall) -> str:
    """``torch.meshgrid(x, y, indexing="ij")``."""
    tensors = ", ".join(map(text_of, call.arguments["tensors"]))
    return f"torch.meshgrid({tensors}, indexing={call.text('indexing')})"


# --- subscripts -----------------------------------------------------------------------------------

TO_THE_END = 2**63 - 1
"""Where a slice without an end stops."""


def select(call: SpelledCall) -> str | None:
    """``x[:, 0]``; a subscript says a dimension from the front."""
    dim, index = call.arguments["dim"], call.arguments["index"]
    return None if dim < 0 else _subscript(call, dim, str(index))


def slice_(call: SpelledCall) -> str | None:
    """``x[:, 1:5]``, ``x[..., ::2]``; Python leaves out a slice that takes all."""
    dim, start, end, step = (call.arguments[name] for name in ("dim", "start", "end", "step"))
    length = call.operand("self").value.shape[dim]
    takes_all = start == 0 and end is not None and end >= length and step == 1
    if dim < 0 or start is None or end is None or takes_all:
        return None
    texts = ["" if start == 0 else str(start), "" if end == TO_THE_END else str(end)]
    return _subscript(call, dim, ":".join(texts + ([str(step)] if step != 1 else [])))


def _subscript(call: SpelledCall, dim: int, text: str) -> str:
    """``x[:, text]``, with dots for what stands before the last dimension."""
    x = call.operand("self")
    is_last = dim == len(x.value.shape) - 1
    before = ["..."] if is_last and dim > 1 else [":"] * dim
    return f"({x.text})[{', '.join([*before, text])}]"


def index(call: SpelledCall) -> str | None:
    """``x[i]``, ``x[:, i, j]``; of whole numbers, or of bools."""
    indices = call.arguments["indices"]
    if not indices or indices[-1] is None or not all(map(_is_index, indices)):
        return None
    places = [":" if item is None else text_of(item) for item in indices]
    return f"({call.text('self')})[{', '.join(places)}]"


def _is_index(item: Operand | None) -> bool:
    """Whether Python takes it as an index and nothing else; a number selects."""
    return item is None or (item.value.shape != () and item.value.dtype in ("i64", "i32", "bool"))


def index_put(call: SpelledCall) -> str | None:
    """``x.index_put((i, j), values)``."""
    has_gaps = any(item is None for item in call.arguments["indices"])
    return None if has_gaps else method("index_put")(call)


# --- layers ---------------------------------------------------------------------------------------


def statistical_norm(name: str, flag: str, passed: Mapping[str, Any]) -> Row:
    """Norms whose ``flag`` says to use the batch's statistics and not those that are kept.

    Where some are kept, the flag is the mode's.
    """
    style: dict[str, Any] = {
        "order": (
            "input",
            "running_mean",
            "running_var",
            "weight",
            "bias",
            flag,
            "momentum",
            "eps",
        ),
        "defaults": {"weight": None, "bias": None, "momentum": 0.1, "eps": 1e-5, **passed},
        "settings": ("cudnn_enabled",),
    }
    kept, none = function(name, Style(**style, flags=(flag,))), function(name, Style(**style))
    return lambda call: (none if call.arguments["running_mean"] is None else kept)(call)


def dropout(name: str, *, default: bool = True) -> Row:
    """``F.dropout(x, 0.1, training=self.training)``; ``default`` is that of ``training``."""
    defaults, rename = {"train": default}, {"train": "training"}
    return function(f"F.{name}", Style(front=2, defaults=defaults, flags=("train",), rename=rename))


def feature_dropout(call: SpelledCall) -> str | None:
    """``F.dropout2d(x, 0.1)``, named by the number of dimensions."""
    rank = len(call.operand("input").value.shape)
    return dropout(f"dropout{rank - 2}d")(call) if rank in (3, 4, 5) else None


def attention(call: SpelledCall) -> str | None:
    """``F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)``."""
    parts = arguments(call, Style(front=3))
    assert parts is not None
    p = call.arguments["dropout_p"]
    if p > 0 and call.mode.training and call.mode.in_module:
        given = f"dropout_p={p}"
        parts[parts.index(given)] = f"{given} if self.training else 0.0"
    return f"F.scaled_dot_product_attention({', '.join(parts)})"


def interpolate(name: str, mode: str) -> Row:
    """``F.interpolate(x, scale_factor=(2.0, 2.0), mode="bilinear")``."""
    style = Style(
        front=1,
        defaults={"output_size": None, "align_corners": False, "scale_factors": None},
        rename={"output_size": "size", "scale_factors": "scale_factor"},
    )
    said = () if mode == "nearest" else (f'mode="{mode}"',)
    return function(
        "F.interpolate", style, also=(*said, *(["antialias=True"] if "_aa" in name else []))
    )


_GRID = Style(
    front=2,
    rename={"interpolation_mode": "mode"},
    defaults={"interpolation_mode": 0, "padding_mode": 0},
    words={
        "interpolation_mode": {0: "bilinear", 1: "nearest", 2: "bicubic"},
        "padding_mode": {0: "zeros", 1: "border", 2: "reflection"},
    },
)
_EMBEDDING = Style(order=("indices", "weight", "padding_idx", "scale_grad_by_freq", "sparse"))
_BRACKETS, _BY_NAME, _CORRECTED = (
    Style(brackets=True),
    Style(front=1),
    Style(defaults={"correction": ALWAYS}),
)
_INSTANCE_NORM = {"use_input_stats": True, "running_mean": None, "running_var": None}

# --- the table ------------------------------------------------------------------------------------


def _bare(name: str) -> str:
    return name.partition(".")[0]


ROWS: dict[str, Row] = {
    f"aten.{name}": row
    for name, row in {
        **{name: infix(symbol) for name, symbol in INFIX.items()},
        **{name: method(_bare(name)) for name in METHODS},
        **{name: method(_bare(name), Style(spread=spread)) for name, spread in SPREAD.items()},
        **{name: function(f"torch.{_bare(name)}") for name in FUNCTIONS},
        **{name: function(f"F.{_bare(name)}") for name in FUNCTIONAL},
        **{
            f"{name}.default": function(
                f"F.{name.removesuffix('_with_indices')}", also=("return_indices=True",)
            )
            for name in POOLS_WITH_INDICES
        },
        **{
            f"{name}.default": function(
                f"F.{form}",
                Style(
                    front=3 if name == "margin_ranking_loss" else 2, words={"reduction": REDUCTIONS}
                ),
            )
            for name, form in LOSSES.items()
        },
        **{name: interpolate(name, mode) for name, mode in INTERPOLATIONS.items()},
        **{
            name: function(f"torch.{_bare(name)}", Style(spread="size"))
            for name in words(
                "zeros.default ones.default empty.memory_format rand.default randn.default"
            )
        },
        **{
            f"linalg_{name}.default": function(f"torch.linalg.{name}")
            for name in words("inv det cholesky qr solve norm vector_norm")
        },
        **{f"{name}.correction": method(name, _CORRECTED) for name in ("var", "std")},
        **{
            f"{name}.correction": function(f"torch.{name}", _CORRECTED)
            for name in ("var_mean", "std_mean")
        },
        **{
            f"conv{n}d.padding": function(f"F.conv{n}d", Style(defaults={"padding": ALWAYS}))
            for n in (1, 2, 3)
        },
        **{
            f"{name}.input": function(f"torch.{name}", Style(flags=("train",)))
            for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        },
        **{f"arange.{kind}": arange for kind in ("default", "start", "start_step")},
        "eq.Scalar": first_of(infix("=="), function("torch.eq")),
        "ne.Scalar": first_of(infix("!="), function("torch.ne")),
        "add.Tensor": first_of(infix("+"), function("torch.add")),
        "sub.Tensor": first_of(infix("-"), function("torch.sub")),
        "rsub.Scalar": first_of(infix("-", reflected=True), function("torch.rsub")),
        "neg.default": prefix("-"),
        "bitwise_not.default": prefix("~"),
        "log_sigmoid.default": function("F.logsigmoid"),
        "special_expit.default": function("torch.special.expit"),
        "contiguous.default": contiguous,
        "mT.default": attribute("mT"),
        "mH.default": attribute("mH"),
        "numpy_T.default": attribute("T"),
        "matrix_H.default": attribute("H"),
        "softmax.int": function("F.softmax", _BY_NAME),
        "log_softmax.int": function("F.log_softmax", _BY_NAME),
        "einsum.default": einsum,
        "tensordot.default": tensordot,
        "flatten.using_ints": method("flatten", Style(front=3)),
        "split.Tensor": function("torch.split", _BRACKETS),
        "split_with_sizes.default": function("torch.split", _BRACKETS),
        "meshgrid.indexing": meshgrid,
        "select.int": first_of(select, method("select")),
        "slice.Tensor": slice_,
        "index.Tensor": index,
        "index_put.default": index_put,
        "one_hot.default": function("F.one_hot", Style(front=2)),
        "embedding.default": function("F.embedding", _EMBEDDING),
        "layer_norm.default": function("F.layer_norm", Style(settings=("cudnn_enable",))),
        "group_norm.default": function("F.group_norm", Style(settings=("cudnn_enabled",))),
        "batch_norm.default": statistical_norm("F.batch_norm", "training", {"training": False}),
        "instance_norm.default": statistical_norm(
            "F.instance_norm", "use_input_stats", _INSTANCE_NORM
        ),
        "convolution.default": function("torch.convolution", _BRACKETS),
        "scaled_dot_product_attention.default": attention,
        "dropout.default": dropout("dropout"),
        "alpha_dropout.default": dropout("alpha_dropout", default=False),
        "feature_alpha_dropout.default": dropout("feature_alpha_dropout", default=False),
        "feature_dropout.default": feature_dropout,
        "grid_sampler.default": function("F.grid_sample", _GRID),
    }.items()
}


# --- one call -------------------------------------------------------------------------------------

_BY_SCHEMA = Style(brackets=True, by_schema=True)


def spell(graph: IRGraph, node: IRNode, operands: Mapping[int, str], mode: Mode) -> str:
    """The call of ``node``, with ``operands`` for the values that it reads.

    What a node of several results gives is a tuple. Raises GraphError where the operator is not
    to be had, or where the node is a marker.
    """
    call = SpelledCall.of(graph, node, operands, mode)
    found = ROWS[node.op](call) if node.op in ROWS else None
    if found is None:
        found = function(_overload(call.op), _BY_SCHEMA)(call)
        assert found is not None
    return without_parentheses(found)


@cache
def _overload(op: str) -> str:
    """``torch.ops.aten.add.Tensor``."""
    found = "torch.ops"
    for name in op.split("."):
        found = f'getattr({found}, "{name}")' if iskeyword(name) else f"{found}.{name}"
    return found
