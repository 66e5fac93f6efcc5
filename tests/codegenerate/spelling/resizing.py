"""Samples of resizing."""

from __future__ import annotations

from tests.codegenerate.spelling_samples import IMAGE, f
from tests.codegenerate.spelling_samples import Sample as S

RESIZING = [
    S("upsample_nearest1d.vec", (f(2, 4, 8), [16], None), "F.interpolate(a, size=(16,))"),
    S(
        "upsample_nearest2d.vec",
        (IMAGE, None, [2.0, 2.0]),
        "F.interpolate(a, scale_factor=(2.0, 2.0))",
    ),
    S(
        "_upsample_nearest_exact2d.vec",
        (IMAGE, [4, 4], None),
        'F.interpolate(a, size=(4, 4), mode="nearest-exact")',
    ),
    S(
        "_upsample_nearest_exact1d.vec",
        (f(2, 4, 8), None, [2.0]),
        'F.interpolate(a, scale_factor=(2.0,), mode="nearest-exact")',
    ),
    S(
        "_upsample_nearest_exact3d.vec",
        (f(1, 2, 4, 4, 4), [2, 2, 2], None),
        'F.interpolate(a, size=(2, 2, 2), mode="nearest-exact")',
    ),
    S(
        "upsample_nearest3d.vec",
        (f(1, 2, 4, 4, 4), [2, 2, 2], None),
        "F.interpolate(a, size=(2, 2, 2))",
    ),
    S(
        "upsample_linear1d.vec",
        (f(2, 4, 8), [16], False, None),
        'F.interpolate(a, size=(16,), mode="linear")',
    ),
    S(
        "upsample_bilinear2d.vec",
        (IMAGE, [4, 4], True, None),
        'F.interpolate(a, size=(4, 4), align_corners=True, mode="bilinear")',
    ),
    S(
        "upsample_bicubic2d.vec",
        (IMAGE, [4, 4], False, None),
        'F.interpolate(a, size=(4, 4), mode="bicubic")',
    ),
    S(
        "upsample_trilinear3d.vec",
        (f(1, 2, 4, 4, 4), None, False, [2.0, 2.0, 2.0]),
        'F.interpolate(a, scale_factor=(2.0, 2.0, 2.0), mode="trilinear")',
    ),
    S(
        "_upsample_bilinear2d_aa.vec",
        (IMAGE, [4, 4], False, None),
        'F.interpolate(a, size=(4, 4), mode="bilinear", antialias=True)',
    ),
    S(
        "_upsample_bicubic2d_aa.vec",
        (IMAGE, [4, 4], False, None),
        'F.interpolate(a, size=(4, 4), mode="bicubic", antialias=True)',
    ),
    S(
        "grid_sampler.default",
        (IMAGE, f(2, 3, 3, 2), 0, 0, False),
        "F.grid_sample(a, b, align_corners=False)",
    ),
    S(
        "grid_sampler.default",
        (IMAGE, f(2, 3, 3, 2), 1, 1, True),
        'F.grid_sample(a, b, mode="nearest", padding_mode="border", align_corners=True)',
    ),
]
