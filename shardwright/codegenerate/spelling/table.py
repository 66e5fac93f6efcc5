"""All rows, one an overload, under the overload's full name."""

from __future__ import annotations

from shardwright.codegenerate.spelling import (
    contractions,
    elementwise,
    factories,
    functional,
    indexing,
    losses,
    reductions,
    shapes,
)
from shardwright.codegenerate.spelling.call import Row

ROWS: dict[str, Row] = {
    **elementwise.ROWS,
    **reductions.ROWS,
    **contractions.ROWS,
    **shapes.ROWS,
    **indexing.ROWS,
    **factories.ROWS,
    **functional.ROWS,
    **losses.ROWS,
}
