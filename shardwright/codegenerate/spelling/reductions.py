"""Rows of reductions, softmax, sorting and sums along a dimension.

mean.dim(x, [-1], keepdim=True)    x.mean(-1, keepdim=True)
softmax.int(x, -1)                 F.softmax(x, dim=-1)
topk(x, 2)                         x.topk(2)
"""

from __future__ import annotations

from shardwright.codegenerate.spelling.arguments import ALWAYS, Style
from shardwright.codegenerate.spelling.call import Row
from shardwright.codegenerate.spelling.forms import function, method, words

METHODS = words("""
    sum.default sum.dim_IntList mean.default mean.dim amax.default amin.default max.default max.dim
    min.default min.dim argmax.default argmin.default prod.default prod.dim_int any.default any.dim
    all.default all.dim var.dim std.dim logsumexp.default cumsum.default cumprod.default
    nansum.default median.default median.dim logcumsumexp.default cummax.default cummin.default
    topk.default sort.default argsort.default kthvalue.default mode.default count_nonzero.default
    count_nonzero.dim_IntList diff.default
""")

FUNCTIONS = words("""
    aminmax.default renorm.default max.other min.other histc.default
""")

_BY_NAME = Style(front=1)
_CORRECTED = Style(defaults={"correction": ALWAYS})

ROWS: dict[str, Row] = {
    **{f"aten.{name}": method(name.partition(".")[0]) for name in METHODS},
    **{f"aten.{name}": function(f"torch.{name.partition('.')[0]}") for name in FUNCTIONS},
    **{f"aten.{name}.correction": method(name, _CORRECTED) for name in ("var", "std")},
    **{
        f"aten.{name}.correction": function(f"torch.{name}", _CORRECTED)
        for name in ("var_mean", "std_mean")
    },
    "aten.softmax.int": function("F.softmax", _BY_NAME),
    "aten.log_softmax.int": function("F.log_softmax", _BY_NAME),
    "aten.linalg_vector_norm.default": function("torch.linalg.vector_norm"),
    "aten.cosine_similarity.default": function("F.cosine_similarity"),
}
