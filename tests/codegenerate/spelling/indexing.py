"""Samples of operators that pick, and write to, places."""

from __future__ import annotations

from tests.codegenerate.spelling_samples import M, Spec, X, Y, f, i
from tests.codegenerate.spelling_samples import Sample as S

LONG = 2**63 - 1
INDEXING = [
    S("select.int", (X, 0, 1), "a[1]"),
    S("select.int", (X, 1, 0), "a[:, 0]"),
    S("select.int", (X, 2, -1), "a[..., -1]"),
    S("select.int", (X, -1, 0), "a.select(-1, 0)"),
    S("slice.Tensor", (X, 0, 1, LONG), "a[1:]"),
    S("slice.Tensor", (X, 1, 0, 2), "a[:, :2]"),
    S("slice.Tensor", (X, 1, 0, -1), "a[:, :-1]"),
    S("slice.Tensor", (X, 2, 1, 3), "a[..., 1:3]"),
    S("slice.Tensor", (X, 2, 0, LONG, 2), "a[..., ::2]"),
    S("slice.Tensor", (f(2, 3, 4, 5), 2, -2, LONG), "a[:, :, -2:]"),
    S("slice.Tensor", (X, -1, 0, 2), "torch.ops.aten.slice.Tensor(a, dim=-1, start=0, end=2)"),
    S(
        "slice.Tensor",
        (X, 1, 0, LONG),
        "torch.ops.aten.slice.Tensor(a, dim=1, start=0, end=9223372036854775807)",
    ),
    S("slice.Tensor", (X, 1, None, 2), "torch.ops.aten.slice.Tensor(a, dim=1, end=2)"),
    S("index.Tensor", (X, [i(5)]), "a[b]"),
    S("index.Tensor", (X, [None, i(5)]), "a[:, b]"),
    S("index.Tensor", (X, [i(5), i(5)]), "a[b, c]"),
    S("index.Tensor", (X, [None, i(5, 1), i(6)]), "a[:, b, c]"),
    S("index.Tensor", (X, [i(), i(6)]), "torch.ops.aten.index.Tensor(a, [b, c])"),
    S("index_put.default", (X, [i(5)], f(5, 3, 4)), "a.index_put([b], c)"),
    S(
        "index_put.default",
        (X, [i(5), i(5)], f(5, 4), True),
        "a.index_put([b, c], d, accumulate=True)",
    ),
    S(
        "index_put.default",
        (X, [None, i(5)], f(2, 5, 4)),
        "torch.ops.aten.index_put.default(a, [None, b], c)",
    ),
    S("index_select.default", (X, 1, i(2)), "a.index_select(1, b)"),
    S("gather.default", (X, 1, i(2, 2, 4)), "a.gather(1, b)"),
    S("scatter.src", (X, 1, i(2, 1, 4), Y), "a.scatter(1, b, c)"),
    S("scatter.value", (X, 1, i(2, 1, 4), 1.0), "a.scatter(1, b, 1.0)"),
    S("scatter_add.default", (X, 1, i(2, 1, 4), Y), "a.scatter_add(1, b, c)"),
    S("scatter_reduce.two", (X, 1, i(2, 1, 4), Y, "sum"), 'a.scatter_reduce(1, b, c, "sum")'),
    S("index_add.default", (X, 0, i(2), Y), "a.index_add(0, b, c)"),
    S("index_copy.default", (X, 0, Spec((2,), "i64", 1), Y), "a.index_copy(0, b, c)"),
    S("index_fill.int_Scalar", (X, 0, i(1), 0.5), "a.index_fill(0, b, 0.5)"),
    S("index_fill.int_Tensor", (X, 0, i(1), f()), "a.index_fill(0, b, c)"),
    S("masked_scatter.default", (X, M, Y), "a.masked_scatter(b, c)"),
    S("take_along_dim.default", (X, i(2, 1, 4), 1), "a.take_along_dim(b, dim=1)"),
    S("take.default", (X, i(3)), "torch.take(a, b)"),
    S("searchsorted.Tensor", (f(4), f(3)), "torch.searchsorted(a, b)"),
    S("searchsorted.Tensor", (f(4), f(3)), "torch.searchsorted(a, b, right=True)", {"right": True}),
    S("bucketize.Tensor", (f(4), f(3)), "torch.bucketize(a, b)"),
    S("one_hot.default", (i(4, below=3), 3), "F.one_hot(a, 3)"),
    S("embedding.default", (f(5, 3), i(2, 4)), "F.embedding(b, a)"),
    S("embedding.default", (f(5, 3), i(2, 4), 1), "F.embedding(b, a, padding_idx=1)"),
]
