"""Calls of norms, convolutions, pools, resizing and recurrent layers."""

from tests.ops.case import Case, F, K, case, of, sizes_of

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
