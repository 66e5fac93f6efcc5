"""Branches on contents that decide nothing a graph holds.

Comes in: a question about the contents of a fake tensor, asked by Python (``if``, ``assert``).
Goes out: the answer that lets the program go on, where the other one only raises; torch's own
error where both go on, since a graph has one path. What always holds: a check that is left out so
is among `Answers.left_out`.

    if not torch.isfinite(loss).all(): raise ...     as if it were finite
    assert labels.max() < 10                         as if it held
    nn.Transformer looking whether a mask is causal  as if it were not: the mask is used as it is
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from shardwright.ir.values import Source
from shardwright.torch_internals import DETECTS_CAUSAL_MASK, FakeTensorMode
from shardwright.tracing.failures import is_of_program

_ANSWERS: dict[CodeType, bool] = {DETECTS_CAUSAL_MASK: False}
"""torch's questions of which either answer gives the same result."""


class Answers(ShapeEnv):
    """What a `FakeTensorMode` knows of numbers, with answers where contents decide nothing."""

    def __init__(self) -> None:
        super().__init__(tracked_fakes=[])
        self.left_out: set[Source] = set()

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """The value of an expression. Raises GuardOnDataDependentSymNode."""
        try:
            return super().evaluate_expr(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            answer = self._answer(sys._getframe(1))
            if answer is None:
                raise
            return answer

    def _answer(self, asked: FrameType | None) -> bool | None:
        frame = asked
        while frame is not None:
            if frame.f_code in _ANSWERS:
                return _ANSWERS[frame.f_code]
            if is_of_program(frame.f_code.co_filename):
                source = Source(frame.f_code.co_filename, frame.f_lineno)
                answer = harmless_answer(source)
                if answer is not None:
                    self.left_out.add(source)
                return answer
            frame = frame.f_back
        return None


def fake_mode() -> tuple[FakeTensorMode, Answers]:
    """A mode that makes fake tensors of a program, and what it answers about their contents."""
    answers = Answers()
    mode = FakeTensorMode(shape_env=answers, allow_non_fake_inputs=True, export=True)
    return mode, answers


def harmless_answer(source: Source) -> bool | None:
    """What a truth value at a line must be for the program not to raise there.

    None where the line is no such check: both of its ways go on.
    """
    for statement in _statements(source.file):
        test = getattr(statement, "test", None)
        if test is None or not test.lineno <= source.line <= (test.end_lineno or 0):
            continue
        wanted = _wanted(statement)
        signs = set(_signs(test))
        if wanted is None or len(signs) != 1:
            return None
        return wanted is signs.pop()
    return None


def _statements(file: str) -> Iterator[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook's cell with magic, or no Python at all
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.Assert)))


def _wanted(statement: ast.stmt) -> bool | None:
    """What the test must be for the statement not to raise; None where it may go on either way."""
    if isinstance(statement, ast.Assert):
        return True
    assert isinstance(statement, ast.If)
    if _only_raises(statement.body):
        return False
    return True if _only_raises(statement.orelse) else None


def _only_raises(body: list[ast.stmt]) -> bool:
    leaves = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Try)
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    return not any(isinstance(node, leaves) for part in body for node in ast.walk(part))


def _signs(test: ast.expr, sign: bool = True) -> Iterator[bool]:
    """For each truth value that a test is made of, whether the test is true where it is."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _signs(part, sign)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _signs(test.operand, not sign)
    else:
        yield sign
