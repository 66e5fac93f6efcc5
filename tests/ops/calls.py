"""A call or more for every row of the catalog."""

import torch

from shardwright.ir import DROPOUT, resolve
from shardwright.ops.rows.elementwise import ROWS
from shardwright.torch_internals import schema_of
from tests.ops.case import B, C, Case, F, I, K, T, U, case, distinct, of, sizes_of, sorted_list

SPECIAL: list[Case] = [
    case("acosh.default", T("a b", lambda s, _: 1 + torch.rand(s, dtype=torch.float64))),
    case("bitwise_not.default", I("a b", 9)),
    case("logical_not.default", B("a b")),
    case("threshold.default", F("a b"), 0.1, 0.0),
    case("clamp.default", F("a b"), -0.3, 0.3),
    case("clip.default", F("a b"), -0.3, 0.3),
    case("clamp_min.default", F("a b"), 0.3),
    case("clamp_max.default", F("a b"), 0.3),
    case("full_like.default", F("a b"), 3.0),
    case("erfinv.default", U("a b")),
    case("real.default", C("a b")),
    case("imag.default", C("a b")),
    *[case("gelu.default", F("a b c"), approximate=how) for how in ("none", "tanh")],
    case("round.decimals", F("a b"), decimals=1),
    case("pow.Tensor_Scalar", U("a b"), 3),
    case("pow.Scalar", 2.0, F("a b")),
    case("rsub.Scalar", F("a b"), 2.0),
    case("remainder.Scalar_Tensor", 2.0, K("a b")),
    case("to.dtype", F("a b"), torch.float32),
    case("to.device", F("a b"), torch.device("cpu"), torch.float32),
    case("to.dtype_layout", F("a b"), dtype=torch.float32),
    case("fill.Scalar", F("a b"), 2.0),
    case("masked_fill.Scalar", F("a b c"), B("b 1"), -1.0),
    case("masked_fill.Tensor", F("a b"), B("a b"), F("")),
    case("where.self", B("a 1 c"), F("b c"), F("a b 1")),
    case("where.ScalarOther", B("a b"), F("a b"), 0.5),
    case("where.ScalarSelf", B("a b"), 0.5, F("a b")),
    case("where.Scalar", B("a b"), 0.5, 1.5),
    case("lerp.Scalar", F("a b"), F("a b"), 0.3),
    case("lerp.Tensor", F("a b"), F("a b"), U("b")),
    case("addcmul.default", F("a b"), F("a b"), F("b"), value=2),
    case("addcdiv.default", F("a b"), F("a b"), U("b"), value=2),
    case("clamp.Tensor", F("a b"), F("b"), None),
    case("clip.Tensor", F("a b"), F("b"), None),
    case("div.Tensor_mode", F("a b"), U("b"), rounding_mode="floor"),
    case("div.Scalar_mode", F("a b"), 0.3, rounding_mode="floor"),
    case("floor_divide.Scalar", K("a b"), 0.3),
    case("floor_divide.default", K("a b"), K("b")),
    case("heaviside.default", K("a b"), K("b")),
    case("logical_and.default", B("a b"), B("a 1")),
    case("logical_or.default", B("a b"), B("a 1")),
    case("logical_xor.default", B("a b"), B("a 1")),
    case("expand_as.default", F("a 1"), F("a b")),
    case("polar.default", U("a b"), F("a b")),
    case("complex.default", F("a b"), F("a b")),
    case("add.Tensor", F("a 1 c"), F("b 1"), alpha=2),
    case("mul.Tensor", F("a b"), F("")),
    case("dropout.default", F("a b"), 0.5, False),
    case("feature_dropout.default", F("a b"), 0.5, False),
    case("alpha_dropout.default", F("a b"), 0.5, False),
    Case(DROPOUT, (F("a b c"), 0.5, 7, I("1", 9), 2, [0] * 3, sizes_of("a b c")), {}),
    Case(DROPOUT, (F("a b"), 0.5, 7, I("1", 9), 2, [3, 2], [12, 12]), {}),
    case("type_as.default", F("a b"), I("c", 9)),
    case("to.other", F("a b"), K("c")),
    case("prelu.default", F("a b c"), F("b")),
    case("prelu.default", F("a b c"), F("1")),
    case("glu.default", F("a b*2 c"), 1),
]


def plain(op: str) -> Case:
    """A call on tensors that are broadcast, and numbers."""
    whole = "bitwise" in op or "__" in op
    sizes = iter(("a b c", "b 1", "c"))
    args = []
    for argument in schema_of(resolve(op)).arguments:
        if argument.has_default_value():
            break
        if str(argument.type) == "Tensor":
            dims = next(sizes)
            args.append(I(dims, 9) if whole else U(dims))
        elif str(argument.type) == "List[Tensor]":
            args.append([U("a 1"), U("b"), U("")])
        else:
            args.append(5 if whole else 0.7)
    return Case(op, tuple(args), {})


# --- calls that make tensors of nothing but sizes -----------------------------------------------


FACTORIES: list[Case] = [
    case("zeros.default", sizes_of("a 1 b")),
    case("ones.default", sizes_of("a b"), dtype=torch.bool),
    case("full.default", sizes_of("a b"), 2.5),
    case("empty.memory_format", sizes_of("a b")),
    case("new_zeros.default", F("c"), sizes_of("a b")),
    case("new_ones.default", F("c"), sizes_of("a b")),
    case("new_full.default", F("c"), sizes_of("a b"), 2.5),
    case("new_empty.default", F("c"), sizes_of("a b")),
    case("arange.default", of("a")),
    case("arange.default", 6.5),
    case("arange.start", 2, 9, dtype=torch.int32),
    case("arange.start_step", 9, -3, -2),
    case("arange.start_step", 0.5, 4.0, 0.75),
    case("scalar_tensor.default", 2.5),
]

# --- calls along dimension 0 or -1 of a tensor without dimensions ------------------------------

SCALARS: list[Case] = [
    *(case(f"{name}.default", F(""), 0) for name in ("cumsum", "cummax", "unsqueeze")),
    *(case(f"{name}.default", F(""), -1) for name in ("sort", "argmax")),
    *(case(f"{name}.default", F(""), [0]) for name in ("flip", "amax", "logsumexp")),
    case("_softmax.default", F(""), 0, False),
    case("squeeze.dim", F(""), -1),
    case("prod.dim_int", F(""), 0),
    case("kthvalue.default", F(""), 1, 0),
    case("linalg_vector_norm.default", F(""), 2, [0]),
    case("var.correction", F(""), [-1], correction=0),
    case("index_select.default", F(""), 0, I("1", 1)),
    case("index_fill.int_Scalar", F(""), -1, I("1", 1), 2.0),
    case("gather.default", F(""), 0, I("", 1)),
]

ELEMENTWISE: list[Case] = [
    *SPECIAL,
    *(
        plain(op)
        for op, row in ROWS.items()
        if row.rule is not None and op not in {known.op for known in (*SPECIAL, *FACTORIES)}
    ),
]


# --- calls of products of matrices, and of attention --------------------------------------------


PRODUCTS: list[Case] = [
    case("linear.default", F("a b k"), F("n k"), F("n")),
    case("linear.default", F("a k"), F("n k")),
    case("matmul.default", F("a b m k"), F("b k n")),
    case("matmul.default", F("a m k"), F("k n")),
    case("matmul.default", F("a 1 m k"), F("b k n")),
    case("matmul.default", F("m k"), F("k")),
    case("matmul.default", F("k"), F("a k n")),
    case("matmul.default", F("k"), F("k")),
    case("mm.default", F("m k"), F("k n")),
    case("bmm.default", F("b m k"), F("b k n")),
    case("mv.default", F("m k"), F("k")),
    case("dot.default", F("k"), F("k")),
    case("outer.default", F("m"), F("n")),
    case("addmm.default", F("n"), F("m k"), F("k n"), beta=0.5, alpha=2),
    case("addmm.default", F("m 1"), F("m k"), F("k n")),
    case("addmv.default", F("m"), F("m k"), F("k")),
    case("baddbmm.default", F("b 1 n"), F("b m k"), F("b k n"), alpha=0.3),
    case("addbmm.default", F("m n"), F("b m k"), F("b k n")),
    case("bilinear.default", F("a i"), F("a j"), F("n i j"), F("n")),
    case("bilinear.default", F("a i"), F("a j"), F("n i j")),
    case("einsum.default", "bij,bjk->bik", [F("b i j"), F("b j k")]),
    case("einsum.default", "b i j, j -> b i", [F("b i j"), F("j")]),
    case("einsum.default", "...i,ij", [F("a b i"), F("i j")]),
    case("einsum.default", "ab,bc,cd->ad", [F("a b"), F("b c"), F("c d")]),
    case("einsum.default", "ii->i", [F("i i")]),
    case("scaled_dot_product_attention.default", F("b h l d"), F("b h s d"), F("b h s e")),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h l d"), F("b h s d"), F("b h s d"), F("b 1 l s")),
        scale=0.3,
    ),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h l d"), F("b 1 s d"), F("b 1 s d"), B("l s")),
    ),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h l d"), F("b h l d"), F("b h l d")),
        is_causal=True,
    ),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h*2 l d"), F("b h s d"), F("b h s d"), F("1 h*2 l s")),
        enable_gqa=True,
    ),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h l d"), F("b 1 s d"), F("b 1 s d")),
        enable_gqa=True,
        is_causal=True,
    ),
]


# --- calls that change a shape, join tensors or take them apart ---------------------------------


VIEWS: list[Case] = [
    case("view.default", F("a b*c"), sizes_of("a b c")),
    case("view.default", F("a b c"), lambda s: [s["a"] * s["b"], -1]),
    case("view.default", F("6 4"), [8, 3]),
    case("view.default", F("a 1 b"), lambda s: [1, s["a"], s["b"], 1]),
    case("_unsafe_view.default", F("a b*c"), sizes_of("a b c")),
    case("reshape.default", F("a b c d"), sizes_of("a b*c d")),
    case("reshape.default", F("a b*4 c"), sizes_of("a*b 4*c")),
    case("flatten.using_ints", F("a b c"), 1, 2),
    case("ravel.default", F("a b")),
    case("unflatten.int", F("a b*c"), 1, sizes_of("b c")),
    case("unsqueeze.default", F("a b"), 1),
    case("squeeze.default", F("a 1 b")),
    case("squeeze.dim", F("a 1 b"), 1),
    case("squeeze.dim", F("a b"), 1),
    case("squeeze.dims", F("a 1 b"), [0, 1]),
    case("transpose.int", F("a b c"), 1, -1),
    case("swapaxes.default", F("a b c"), 0, 2),
    case("swapdims.default", F("a b c"), 0, 2),
    case("permute.default", F("a b c"), [2, 0, -2]),
    case("movedim.int", F("a b c"), 0, -1),
    case("movedim.intlist", F("a b c"), [0, 1], [1, 2]),
    case("t.default", F("a b")),
    case("numpy_T.default", F("a b")),
    case("mT.default", F("a b c")),
    case("slice.Tensor", F("a b"), 1, 1, 3),
    case("slice.Tensor", F("a b"), 1, 0, 9223372036854775807),
    case("slice.Tensor", F("a b*2"), 1, 1, -1, 2),
    case("narrow.default", F("a b"), 1, 1, 2),
    case("slice.Tensor", F("a b"), 1, lambda s: -s["b"], lambda s: s["b"]),
    case("narrow.default", F("a b"), 1, 0, lambda s: s["b"]),
    case("split.sizes", F("a 6"), [6], 1),
    case("split_with_sizes.default", F("a 6"), [6], 1),
    case("split.Tensor", F("a b"), lambda s: s["b"], 1),
    case("chunk.default", F("a b"), 1, 1),
    case("split.Tensor", F("a b"), 2, 1),
    case("split.sizes", F("a 6"), [2, 4], 1),
    case("split_with_sizes.default", F("a 6"), [2, 4], -1),
    case("chunk.default", F("a b*3"), 3, 1),
    case("unsafe_chunk.default", F("a b*3"), 3, 1),
    case("tensor_split.sections", F("a b"), 3, 1),
    case("tensor_split.indices", F("a b"), [1, 3], 1),
    case("expand.default", F("a 1 b"), lambda s: [s["c"], -1, s["d"], -1]),
    case("broadcast_to.default", F("a 1"), sizes_of("b a c")),
    case("repeat.default", F("a b 1"), lambda s: [s["c"], 1, s["d"], s["e"]]),
    case("tile.default", F("a b"), [3]),
    case("repeat_interleave.self_int", F("a b"), 3, 1),
    case("repeat_interleave.self_int", F("a b"), 3),
    case("repeat_interleave.self_int", F("a b"), 3, 1, output_size=lambda s: 3 * s["b"]),
    case("select.int", F("a b c"), 1, 2),
    case("unbind.int", F("a 3 c"), 1),
    case("cat.default", [F("a b"), F("a 3"), F("a b")], 1),
    case("cat.default", [F("0"), F("a 3"), F("a b")], 1),
    case("concat.default", [F("a b"), F("a 3")], -1),
    case("stack.default", [F("a b"), F("a b")], 1),
    case("broadcast_tensors.default", [F("a b"), F("a b")]),
    case("broadcast_tensors.default", [F("a 1 b"), F("c b"), F("")]),
    case("flip.default", F("a b"), [1]),
    case("roll.default", F("a b c"), [1, 2], [1, 2]),
    case("roll.default", F("a b"), [1]),
    case("pad.default", F("a b"), [1, 2]),
    case("pad.default", F("a b c"), [1, 2, 0, 0], "reflect"),
    case("constant_pad_nd.default", F("a b"), [1, 2], 3.0),
    case("tril.default", F("a m n"), 1),
    case("triu.default", F("m n"), -1),
    case("diagonal.default", F("a b c"), 1, 1, 2),
    case("unfold.default", F("a b"), 1, 3, 2),
    case("meshgrid.indexing", [F("a"), F("b")], indexing="xy"),
    case("meshgrid.default", [F("a"), F("b"), F("c")]),
    case("pixel_shuffle.default", F("a b*4 c d"), 2),
    case("pixel_unshuffle.default", F("a b c*2 d*2"), 2),
    case("view_as_complex.default", F("a b 2")),
    case("view_as_real.default", C("a b")),
]


# --- calls that work along a dimension: reductions, softmax, sorting ----------------------------


ALONG: list[Case] = [
    case("softmax.int", F("a b c"), 1),
    case("_safe_softmax.default", F("a b c"), 1),
    case("_softmax.default", F("a b c"), -1, False),
    case("log_softmax.int", F("a b"), -1),
    case("_log_softmax.default", F("a b"), 1, False),
    case("logsumexp.default", F("a b"), [1]),
    *(
        case(f"{name}.default", F("a b c"), 1)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
    ),
    case("sort.default", F("a b c"), 1),
    case("sort.stable", F("a b c"), stable=True, dim=1),
    case("argsort.default", F("a b"), 1),
    case("argsort.stable", F("a b"), stable=True, dim=1),
    case("topk.default", F("a b c"), 2, 1),
    case("kthvalue.default", F("a b"), 2, 1),
    case("argmax.default", F("a b"), 1),
    case("argmax.default", F("a b")),
    case("argmin.default", F("a b"), 1, True),
    *(case(f"{name}.dim", F("a b"), 1) for name in ("max", "min", "median", "nanmedian")),
    case("mode.default", F("a b"), 1),
    case("prod.default", F("a b")),
    case("prod.dim_int", F("a b"), 1),
    case("var.correction", F("a b c"), [1], correction=1),
    case("std.correction", F("a b"), [1], correction=0, keepdim=True),
    case("var.dim", F("a b"), [1]),
    case("std.dim", F("a b"), [1]),
    case("var.default", F("a b")),
    case("std.default", F("a b")),
    case("var_mean.correction", F("a b"), [1], correction=1),
    case("std_mean.correction", F("a b"), [1], correction=1),
    case("linalg_vector_norm.default", F("a b"), 2, [1], True),
    case("norm.ScalarOpt_dim", F("a b"), 2, [1]),
    case("norm.Scalar", F("a b"), 2),
    case("aminmax.default", F("a b"), dim=1),
    case("median.default", F("a b")),
    case("msort.default", F("a b")),
    case("sum.default", F("a b")),
    case("sum.dim_IntList", F("a b c"), [1]),
    case("sum.dim_IntList", F("a b c"), [0, 2], True),
    case("nansum.default", F("a b"), [1]),
    case("count_nonzero.dim_IntList", I("a b", 2), [1]),
    case("count_nonzero.default", I("a b", 2)),
    case("amax.default", F("a b"), [1]),
    case("max.default", F("a b")),
    case("amin.default", F("a b"), [0], True),
    case("min.default", F("a b")),
    *(case(f"{name}.default", B("a b")) for name in ("any", "all")),
    *(case(f"{name}.dim", B("a b"), 1) for name in ("any", "all")),
    *(case(f"{name}.dims", B("a b c"), [0, 1]) for name in ("any", "all")),
    case("mean.default", F("a b")),
    case("mean.dim", F("a b c"), [1, 2], True),
    case("mean.dim", F("a b c"), [-1]),
    case("histc.default", U("a b"), 4, 0, 1),
    case("histc.default", U("a"), 4),
    case("cosine_similarity.default", F("a b c"), F("a b 1"), 1),
    case("diff.default", F("a b"), 1, -1, F("a 1")),
]


# --- calls of norms, convolutions, pools, resizing and recurrent layers -------------------------


LAYERS: list[Case] = [
    case("layer_norm.default", F("a b c d"), sizes_of("c d"), F("c d"), F("c d")),
    case("layer_norm.default", F("a b c"), sizes_of("c")),
    case("native_layer_norm.default", F("a b c"), sizes_of("c"), F("c"), F("c"), 1e-5),
    case("rms_norm.default", F("a b c"), sizes_of("c"), F("c")),
    case("group_norm.default", F("n g*3 h w"), of("g"), F("g*3"), F("g*3")),
    case("group_norm.default", F("n c h"), 1, F("c"), F("c")),
    case("group_norm.default", F("n c h"), of("c")),
    case(
        "batch_norm.default",
        *(F("n c h w"), F("c"), F("c"), K("c"), K("c")),
        *(False, 0.1, 1e-5, False),
    ),
    case(
        "_native_batch_norm_legit_functional.default",
        *(F("n c h w"), F("c"), F("c"), K("c"), K("c")),
        *(True, 0.1, 1e-5),
    ),
    case(
        "_native_batch_norm_legit_no_training.default",
        *(F("n c h w"), F("c"), F("c"), K("c"), K("c")),
        *(0.1, 1e-5),
    ),
    case(
        "instance_norm.default",
        *(F("n c h w"), F("c"), F("c"), None, None),
        *(True, 0.1, 1e-5, False),
    ),
    case("conv1d.default", F("n c 9"), F("o c 3"), F("o"), [2], [1]),
    case("conv1d.default", F("n g 9"), F("g 1 3"), F("g"), [1], [2], [1], of("g")),
    case("conv1d.padding", F("n c 9"), F("o c 3"), None, [1], "same"),
    case("conv2d.default", F("n c 6 7"), F("o c 3 2"), F("o"), [1, 1], [1, 0]),
    case("conv2d.default", F("n h*2 w*3 c"), F("o h*2 2 3"), F("o")),
    case("conv2d.default", F("n c h*2 w*3"), F("o c 2 3"), F("o"), [2, 3]),
    case("conv2d.default", F("n c h w"), F("o c 1 1")),
    case("conv2d.default", F("n g*2 6 5"), F("g*3 2 3 3"), F("g*3"), groups=of("g")),
    case("conv2d.default", F("c 6 5"), F("o c 3 3"), F("o")),
    case("conv2d.padding", F("n c 6 6"), F("o c 3 3"), F("o"), [1, 1], "valid"),
    case("conv3d.default", F("n c 4 4 4"), F("o c 2 2 2"), F("o")),
    case("conv3d.padding", F("n c 4 4 4"), F("o c 2 2 2"), F("o"), [1, 1, 1], "same"),
    case("conv_transpose1d.default", F("n c 5"), F("c o 3"), F("o"), [2]),
    case("conv_transpose2d.input", F("n c 5 4"), F("c o 3 3"), F("o"), [2, 2]),
    case("conv_transpose2d.input", F("n g*2 4 4"), F("g*2 3 2 2"), F("g*3"), groups=of("g")),
    case("conv_transpose3d.input", F("n c 3 3 3"), F("c o 2 2 2"), F("o")),
    case(
        "convolution.default",
        *(F("n c 6 6"), F("o c 3 3"), F("o")),
        *([1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    ),
    case("max_pool1d.default", F("n c 8"), [2]),
    case("max_pool2d.default", F("n c 6 6"), [3, 3], [2, 2], [1, 1]),
    case("max_pool3d.default", F("n c 4 4 4"), [2, 2, 2]),
    case("max_pool2d_with_indices.default", F("n c 6 6"), [2, 2]),
    case("max_pool3d_with_indices.default", F("n c 4 4 4"), [2, 2, 2]),
    case("avg_pool1d.default", F("n c 8"), [3]),
    case("avg_pool2d.default", F("n c 6 6"), [2, 2]),
    case("avg_pool3d.default", F("n c 4 4 4"), [2, 2, 2]),
    *(
        case(f"adaptive_{kind}_pool{n}d.default", F("n c 5 6 4"[: 2 * n + 3]), [2] * n)
        for n in (1, 2, 3)
        for kind in ("avg", "max")
    ),
    case("upsample_nearest1d.vec", F("n c 5"), None, [2.0]),
    case("upsample_nearest2d.vec", F("n c 5 4"), [10, 8], None),
    case("upsample_nearest3d.vec", F("n c 3 4 3"), None, [2.0, 2.0, 2.0]),
    case("upsample_nearest1d.default", F("n c 5"), [10]),
    case("upsample_nearest2d.default", F("n c 5 4"), [10, 8]),
    case("upsample_nearest3d.default", F("n c 3 3 3"), [6, 6, 6]),
    case("_upsample_nearest_exact1d.vec", F("n c 5"), None, [2.0]),
    case("_upsample_nearest_exact2d.vec", F("n c 5 4"), None, [2.0, 2.0]),
    case("_upsample_nearest_exact3d.vec", F("n c 3 3 3"), None, [2.0, 2.0, 2.0]),
    case("upsample_linear1d.vec", F("n c 5"), None, False, [2.0]),
    case("upsample_bilinear2d.vec", F("n c 5 4"), None, True, [2.0, 2.0]),
    case("upsample_bilinear2d.default", F("n c 5 4"), [10, 8], False),
    case("upsample_bicubic2d.vec", F("n c 5 4"), None, True, [2.0, 2.0]),
    case("upsample_trilinear3d.vec", F("n c 3 3 3"), None, True, [2.0, 2.0, 2.0]),
    case("_upsample_bilinear2d_aa.vec", F("n c 6 6"), [3, 3], False, None),
    *(
        case(f"{kind}_pad{n}d.default", F("n c 4 5 3"[: 2 * n + 3]), [1] * (2 * n))
        for n in (1, 2, 3)
        for kind in ("reflection", "replication")
    ),
    case("grid_sampler.default", F("n c 5 4"), F("n h w 2"), 0, 0, False),
    case(
        "lstm.input",
        *(F("l n i"), [F("1 n h"), F("1 n h")]),
        [F("h*4 i"), F("h*4 h"), F("h*4"), F("h*4")],
        *(True, 1, 0.0, False, False, False),
    ),
    case(
        "gru.input",
        *(F("n l i"), F("2 n h")),
        [F("h*3 i"), F("h*3 h"), F("h*3 i"), F("h*3 h")],
        *(False, 1, 0.0, False, True, True),
    ),
    *(
        case(
            f"rnn_{kind}.input",
            *(F("l n i"), F("1 n h"), [F("h i"), F("h h")]),
            *(False, 1, 0.0, False, False, False),
        )
        for kind in ("tanh", "relu")
    ),
]


# --- calls of losses ----------------------------------------------------------------------------


LOSSES: list[Case] = [
    *(
        case(f"{name}.default", F("a b"), F("a b"), reduction)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for reduction in (0, 1, 2)
    ),
    case("soft_margin_loss.default", F("a b"), K("a b"), 1),
    case("binary_cross_entropy.default", U("a b"), U("a b"), K("b"), 1),
    case("binary_cross_entropy_with_logits.default", F("a b"), U("a b"), None, K("b"), 1),
    case("poisson_nll_loss.default", F("a b"), U("a b"), True, False, 1e-8, 1),
    case("kl_div.default", F("a b"), U("a b"), 2),
    case("kl_div.default", F("a b"), U("a b"), 1),
    *(case("cross_entropy_loss.default", F("a c"), I("a", "c"), None, r) for r in (0, 1, 2)),
    case("cross_entropy_loss.default", F("a c d"), I("a d", "c"), K("c"), 2),
    case("cross_entropy_loss.default", F("a c"), U("a c"), None, 2, -100, 0.1),
    case("nll_loss.default", F("a c"), I("a", "c"), None, 2),
    case("nll_loss_nd.default", F("a c"), I("a", "c"), K("c"), 0),
    case("nll_loss2d.default", F("a c d e"), I("a d e", "c"), None, 2),
]


# --- calls that look up, or write, by indices ---------------------------------------------------


INDICES: list[Case] = [
    case("embedding.default", F("v d"), I("a b", "v")),
    case("embedding.default", F("v d"), I("a", "v"), 2),
    case("gather.default", F("a v c"), 1, I("a j c", "v")),
    case("gather.default", F("a v"), 1, I("3 j", "v")),
    case("index_select.default", F("a v c"), 1, I("j", "v")),
    case("index.Tensor", F("v d"), [I("j i", "v")]),
    case("index.Tensor", F("a v d"), [None, T("j", lambda s, z: torch.arange(s[0]) % 4 - 2)]),
    case("index.Tensor", F("a b c"), [I("j 1", "a"), I("i", "b")]),
    case("index.Tensor", F("a b c"), [I("j", "a"), None, I("j", "c")]),
    case("scatter.src", F("a v c"), 1, I("a 1 c", "v"), F("a 1 c")),
    case("scatter.value", F("a v"), 1, I("a j", "v"), 2.0),
    case("scatter.reduce", K("a v"), 1, I("a j", "v"), K("a j"), reduce="add"),
    case("scatter.value_reduce", K("a v"), 1, I("a j", "v"), 2.0, reduce="multiply"),
    case("scatter_add.default", F("a v"), 1, I("a j", "v"), F("a j")),
    case("scatter_reduce.two", F("a v"), 1, I("a j", "v"), F("a j"), "amax"),
    case("index_add.default", F("a v"), 1, I("j", "v"), F("a j")),
    case("index_copy.default", F("a v"), 1, distinct("3", 4), F("a 3")),
    case("index_fill.int_Scalar", F("a v"), 1, distinct("3", 4), 2.0),
    case("index_fill.int_Tensor", F("a v"), 1, distinct("3", 4), F("")),
    case("index_put.default", F("a b"), [I("j", "a")], F("j b"), True),
    case("index_put.default", F("a b c"), [None, I("3", "b")], F("c"), True),
    case("one_hot.default", I("a b", 7), 7),
    case("bucketize.Tensor", U("a b"), sorted_list("c")),
    case("isin.Tensor_Tensor", I("a b", 9), I("c", 9)),
    case("searchsorted.Tensor", sorted_list("c"), U("a b")),
    case("searchsorted.Tensor", sorted_list("a c"), U("a b")),
]


CASES: list[Case] = [
    *ELEMENTWISE,
    *PRODUCTS,
    *VIEWS,
    *ALONG,
    *LAYERS,
    *LOSSES,
    *INDICES,
    *FACTORIES,
    *SCALARS,
]
