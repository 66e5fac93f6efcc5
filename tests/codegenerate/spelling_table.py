"""The table of sample calls: one line or more for each row of the tables of spelling."""

from __future__ import annotations

from tests.codegenerate.spelling.contractions import CONTRACTIONS
from tests.codegenerate.spelling.convolutions import CONVOLUTIONS
from tests.codegenerate.spelling.elementwise import ELEMENTWISE
from tests.codegenerate.spelling.factories import FACTORIES
from tests.codegenerate.spelling.functional import FUNCTIONAL
from tests.codegenerate.spelling.indexing import INDEXING
from tests.codegenerate.spelling.losses import LOSSES
from tests.codegenerate.spelling.reductions import REDUCTIONS
from tests.codegenerate.spelling.resizing import RESIZING
from tests.codegenerate.spelling.shapes import SHAPES

SAMPLES = [
    *ELEMENTWISE,
    *REDUCTIONS,
    *SHAPES,
    *INDEXING,
    *FACTORIES,
    *CONTRACTIONS,
    *CONVOLUTIONS,
    *FUNCTIONAL,
    *RESIZING,
    *LOSSES,
]
