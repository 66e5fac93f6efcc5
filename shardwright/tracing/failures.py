"""What a model does that no graph can hold, told with its line and what to do instead.

A message begins with the deepest line of the program that is neither torch's nor ours, where there
is one.
"""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from shardwright.errors import CaptureError
from shardwright.ir.values import Source


class CaptureWarning(UserWarning):
    """A captured graph leaves something undone that the model does beside computing its result."""


_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parent.parent) + "/"
_GENERATED = ("<string>", "<frozen ", "<eval_with_key>")

CONTROL_FLOW = (
    "this runs a function under control of a tensor, and a graph has one path: compute every side "
    "and choose with torch.where, or write the loop out"
)
FLEX_ATTENTION = (
    "flex_attention is a kernel that torch.compile writes, and a graph has operators alone: "
    "use scaled_dot_product_attention, with a mask where the scores are changed"
)
_COMPILED = (
    "torch.compile compiles a part of the program while it is traced, in this release of torch: "
    "let the program use what torch.compile was given (a compiled module has it as `_orig_mod`), "
    "or use a newer torch, which traces through"
)
# What is found in the exception's type, in its text or among torch's files in its traceback, and
# what to do about it; the first that fits.
_ADVICE: tuple[tuple[str, str], ...] = (
    ("torch/nn/attention/flex_attention.py", FLEX_ATTENTION),
    ("torch/_higher_order_ops/", CONTROL_FLOW),
    ("torch._dynamo.exc.", _COMPILED),
    (
        "DataDependent",
        "the program branches on the contents of a tensor, and a graph has one path: compute both "
        "sides and choose with torch.where, or decide before the call and pass a Python bool",
    ),
    (
        "data-dependent",
        "a size depends on the contents of a tensor, and a graph's sizes are fixed: use masks, "
        "torch.where or a fixed size",
    ),
    (
        "exported program constant's list",
        "a tensor was taken past torch's operators, as by `x.data`: use x.detach()",
    ),
    (
        "torch._C.Generator",
        "a graph holds no torch.Generator; use the default one with torch.manual_seed",
    ),
    (
        ".numpy()",
        "numpy sees contents, of which there are none while a graph is made: write it with torch",
    ),
    (
        "FakeTensor",
        "a tensor was used outside of torch's operators: compute with torch operators alone",
    ),
)
_DEFAULT_ADVICE = "the model raised this while it was traced on the given arguments"


def explain(error: BaseException) -> CaptureError:
    """The CaptureError for an exception that the model raised."""
    kind = type(error).__name__
    summary = (str(error).strip() or kind).splitlines()[0]
    where = f"{type(error).__module__}.{kind} {error} {' '.join(_files_of_torch(error))}"
    advice = next((text for sign, text in _ADVICE if sign in where), _DEFAULT_ADVICE)
    return CaptureError(f"{line_before(line_of(error))}{advice} ({kind}: {summary})")


def _files_of_torch(error: BaseException) -> Iterator[str]:
    """The files of torch that an exception's traceback goes through: ``torch/_tensor.py``."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            yield f"torch/{file.removeprefix(_TORCH)}"


def line_of(error: BaseException) -> Source | None:
    """The deepest line in an exception's traceback that is neither torch's nor ours."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [Source(frame.f_code.co_filename, line) for frame, line in frames]
    return next((source for source in reversed(lines) if is_of_program(source.file)), None)


@cache
def is_of_program(file: str) -> bool:
    """Whether a file is neither torch's nor ours, nor generated code."""
    return not file.startswith((_TORCH, _OURS, *_GENERATED))


def line_before(source: Source | None) -> str:
    """``model.py:7 `if x.sum() > 0:`: ``, or nothing where the line is not known."""
    if source is None:
        return ""
    code = linecache.getline(source.file, source.line).strip()
    return f"{source.file}:{source.line}{f' `{code}`' if code else ''}: "


# --- checks of contents ---------------------------------------------------------------------------


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
