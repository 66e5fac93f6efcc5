"""Samples of products of matrices, and of linear algebra."""

from __future__ import annotations

from tests.codegenerate.spelling_samples import Sample as S
from tests.codegenerate.spelling_samples import f

SQUARE = f(3, 3)
CONTRACTIONS = [
    S("mm.default", (f(2, 3), f(3, 4)), "torch.mm(a, b)"),
    S("bmm.default", (f(5, 2, 3), f(5, 3, 4)), "torch.bmm(a, b)"),
    S("mv.default", (f(2, 3), f(3)), "torch.mv(a, b)"),
    S("dot.default", (f(3), f(3)), "torch.dot(a, b)"),
    S("inner.default", (f(2, 3), f(4, 3)), "torch.inner(a, b)"),
    S("outer.default", (f(3), f(4)), "torch.outer(a, b)"),
    S("addmm.default", (f(4), f(2, 3), f(3, 4)), "torch.addmm(a, b, c)"),
    S("addmm.default", (f(4), f(2, 3), f(3, 4)), "torch.addmm(a, b, c, alpha=0.5)", {"alpha": 0.5}),
    S("addbmm.default", (f(2, 4), f(5, 2, 3), f(5, 3, 4)), "torch.addbmm(a, b, c)"),
    S(
        "baddbmm.default",
        (f(5, 2, 4), f(5, 2, 3), f(5, 3, 4)),
        "torch.baddbmm(a, b, c, beta=0.5)",
        {"beta": 0.5},
    ),
    S("addmv.default", (f(2), f(2, 3), f(3)), "torch.addmv(a, b, c)"),
    S("addr.default", (f(2, 3), f(2), f(3)), "torch.addr(a, b, c)"),
    S("trace.default", (SQUARE,), "torch.trace(a)"),
    S("bilinear.default", (f(5, 2), f(5, 3), f(4, 2, 3), f(4)), "torch.bilinear(a, b, c, d)"),
    S("einsum.default", ("ij,jk->ik", [f(2, 3), f(3, 4)]), 'torch.einsum("ij,jk->ik", a, b)'),
    S("tensordot.default", (f(2, 3), f(3, 4), [1], [0]), "torch.tensordot(a, b, dims=([1], [0]))"),
    S("linalg_inv.default", (SQUARE,), "torch.linalg.inv(a)"),
    S("linalg_cholesky.default", (f(1, 1),), "torch.linalg.cholesky(a)"),
    S("linalg_det.default", (SQUARE,), "torch.linalg.det(a)"),
    S("linalg_solve.default", (SQUARE, f(3, 2)), "torch.linalg.solve(a, b)"),
    S("linalg_qr.default", (SQUARE,), "torch.linalg.qr(a)"),
    S("linalg_norm.default", (SQUARE,), "torch.linalg.norm(a)"),
]
