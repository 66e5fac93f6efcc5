"""Samples of linear layers, convolutions and pools."""

from __future__ import annotations

from tests.codegenerate.spelling_samples import IMAGE, X, f
from tests.codegenerate.spelling_samples import Sample as S

CONVOLUTIONS = [
    S("linear.default", (X, f(5, 4)), "F.linear(a, b)"),
    S("linear.default", (X, f(5, 4), f(5)), "F.linear(a, b, c)"),
    S("conv1d.default", (f(2, 4, 8), f(6, 4, 3), f(6)), "F.conv1d(a, b, c)"),
    S(
        "conv1d.default",
        (f(2, 4, 8), f(4, 1, 3), None, [1], [2], [1], 4),
        "F.conv1d(a, b, padding=2, groups=4)",
    ),
    S(
        "conv2d.default",
        (IMAGE, f(6, 4, 3, 3), f(6), [2, 2], [1, 1]),
        "F.conv2d(a, b, c, stride=2, padding=1)",
    ),
    S("conv2d.default", (IMAGE, f(6, 4, 3, 3), None, [2, 1]), "F.conv2d(a, b, stride=(2, 1))"),
    S(
        "conv2d.padding",
        (IMAGE, f(6, 4, 3, 3), None, [1, 1], "same"),
        'F.conv2d(a, b, padding="same")',
    ),
    S(
        "conv1d.padding",
        (f(2, 4, 8), f(6, 4, 3), None, [1], "same"),
        'F.conv1d(a, b, padding="same")',
    ),
    S(
        "conv3d.padding",
        (f(1, 2, 4, 4, 4), f(3, 2, 3, 3, 3), None, [1, 1, 1], "same"),
        'F.conv3d(a, b, padding="same")',
    ),
    S("conv3d.default", (f(1, 2, 4, 4, 4), f(3, 2, 3, 3, 3)), "F.conv3d(a, b)"),
    S(
        "conv_transpose1d.default",
        (f(2, 4, 8), f(4, 6, 3), f(6), [2]),
        "F.conv_transpose1d(a, b, c, stride=2)",
    ),
    S(
        "conv_transpose2d.input",
        (IMAGE, f(4, 6, 3, 3), None, [2, 2], [1, 1], [1, 1]),
        "F.conv_transpose2d(a, b, stride=2, padding=1, output_padding=1)",
    ),
    S("conv_transpose3d.input", (f(1, 2, 4, 4, 4), f(2, 3, 3, 3, 3)), "F.conv_transpose3d(a, b)"),
    S(
        "convolution.default",
        (IMAGE, f(6, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        "torch.convolution(a, b, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)",
    ),
    S("max_pool1d.default", (f(2, 4, 8), [2]), "F.max_pool1d(a, 2)"),
    S(
        "max_pool2d.default",
        (IMAGE, [3, 3], [2, 2], [1, 1]),
        "F.max_pool2d(a, 3, stride=2, padding=1)",
    ),
    S("max_pool3d.default", (f(1, 2, 4, 4, 4), [2, 2, 2]), "F.max_pool3d(a, 2)"),
    S(
        "max_pool2d_with_indices.default",
        (IMAGE, [2, 2]),
        "F.max_pool2d(a, 2, return_indices=True)",
    ),
    S(
        "max_pool1d_with_indices.default",
        (f(2, 4, 8), [2]),
        "F.max_pool1d(a, 2, return_indices=True)",
    ),
    S(
        "max_pool3d_with_indices.default",
        (f(1, 2, 4, 4, 4), [2, 2, 2]),
        "F.max_pool3d(a, 2, return_indices=True)",
    ),
    S("avg_pool1d.default", (f(2, 4, 8), [2]), "F.avg_pool1d(a, 2)"),
    S("avg_pool2d.default", (IMAGE, [2, 2], [2, 2]), "F.avg_pool2d(a, 2, stride=2)"),
    S("avg_pool3d.default", (f(1, 2, 4, 4, 4), [2, 2, 2]), "F.avg_pool3d(a, 2)"),
    S("adaptive_avg_pool1d.default", (f(2, 4, 8), [1]), "F.adaptive_avg_pool1d(a, 1)"),
    S("adaptive_avg_pool2d.default", (IMAGE, [1, 1]), "F.adaptive_avg_pool2d(a, 1)"),
    S("adaptive_avg_pool2d.default", (IMAGE, [2, 4]), "F.adaptive_avg_pool2d(a, (2, 4))"),
    S("adaptive_avg_pool3d.default", (f(1, 2, 4, 4, 4), [2, 2, 2]), "F.adaptive_avg_pool3d(a, 2)"),
    S(
        "adaptive_max_pool1d.default",
        (f(2, 4, 8), [2]),
        "F.adaptive_max_pool1d(a, 2, return_indices=True)",
    ),
    S(
        "adaptive_max_pool2d.default",
        (IMAGE, [2, 2]),
        "F.adaptive_max_pool2d(a, 2, return_indices=True)",
    ),
    S(
        "adaptive_max_pool3d.default",
        (f(1, 2, 4, 4, 4), [2, 2, 2]),
        "F.adaptive_max_pool3d(a, 2, return_indices=True)",
    ),
]
