"""Rows of products of matrices, and of linear algebra.

matmul(x, w)                   x @ w    (elementwise's, with the other infix forms)
addmm(b, x, w)                 torch.addmm(b, x, w)
einsum("ij,jk->ik", [x, y])    torch.einsum("ij,jk->ik", x, y)
"""

from __future__ import annotations

from shardwright.codegenerate.expression import Expression
from shardwright.codegenerate.spelling.arguments import expression_of
from shardwright.codegenerate.spelling.call import Call, Row
from shardwright.codegenerate.spelling.forms import function, words

FUNCTIONS = words("""
    mm.default bmm.default mv.default dot.default inner.default outer.default addmm.default
    addbmm.default baddbmm.default addmv.default addr.default bilinear.default trace.default
""")

LINALG = words("inv det cholesky qr solve norm")


def einsum(call: Call) -> Expression | None:
    """``torch.einsum("ij,jk->ik", x, y)``; of more tensors Python looks for a path itself."""
    equation, tensors = call.arguments["equation"], call.arguments["tensors"]
    if len(tensors) > 2 or call.arguments["path"] is not None:
        return None
    texts = [expression_of(item).text for item in (equation, *tensors)]
    return Expression(f"torch.einsum({', '.join(texts)})")


def tensordot(call: Call) -> Expression:
    """``torch.tensordot(x, y, dims=([1], [0]))``."""
    x, y = (call.operand(name).expression for name in ("self", "other"))
    dims = f"({call.arguments['dims_self']}, {call.arguments['dims_other']})"
    return Expression(f"torch.tensordot({x}, {y}, dims={dims})")


ROWS: dict[str, Row] = {
    **{f"aten.{name}": function(f"torch.{name.partition('.')[0]}") for name in FUNCTIONS},
    **{f"aten.linalg_{name}.default": function(f"torch.linalg.{name}") for name in LINALG},
    "aten.einsum.default": einsum,
    "aten.tensordot.default": tensordot,
}
