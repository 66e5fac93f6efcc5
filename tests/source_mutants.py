"""Mutants of the package's own code, and whether the tests that mirror its files detect them.

``python -m tests.source_mutants --count 80 --seed 17``: each mutant changes one place of one module
of a copy of the sources: a comparison, an operator, a number, a condition, a call that goes.
The tests of the module (`tests/FOLDER/test_MODULE*.py`, or its folder's) run against it; a mutant
is killed where one fails. Places are drawn by the seed, in proportion to the lines of code, so that
two versions of the package are measured alike.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "shardwright"
SECONDS = 400
"""How long the tests of one mutant may take; what stands still is detected."""
FEW, QUIET = (
    "not gpu and not exhaustive and not zoo and not processes",
    ("-q", "-x", "-p", "no:cacheprovider"),
)

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    path: Path
    line: int
    change: str
    source: str


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """What may be changed, and how."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            yield node, "comparison"
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
            yield node, "operator"
        elif isinstance(node, ast.BoolOp):
            yield node, "and, or"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield node, "number"
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node, "condition"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "call"


def change(node: ast.AST) -> None:
    """Change a place."""
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = not node.value if type(node.value) is bool else node.value + 1
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)


def drawn(count: int, seed: int) -> list[Mutant]:
    """So many mutants of the package as it stands."""
    random_ = random.Random(seed)
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    sources = {path: path.read_text() for path in paths}
    lines = [len(source.splitlines()) for source in sources.values()]
    found: list[Mutant] = []
    while len(found) < count:
        (path,) = random_.choices(paths, lines)
        tree = ast.parse(sources[path])
        here = list(places(tree))
        if not here:
            continue
        node, kind = random_.choice(here)
        before = ast.unparse(node).splitlines()[0]
        change(node)
        ast.fix_missing_locations(tree)
        said = f"{kind}: {before[:60]}"
        found.append(Mutant(path.relative_to(ROOT), node.lineno, said, ast.unparse(tree)))
    return found


def tests_of(module: Path) -> list[Path]:
    """The tests that mirror a module: its own by name, else its folder's, else its package's."""
    folder = ROOT / "tests" / module.relative_to(PACKAGE).parent
    own = sorted((ROOT / "tests").rglob(f"test_{module.stem}*.py"))
    if own:
        return own
    while not list(folder.glob("test_*.py")) and folder != ROOT / "tests":
        folder = folder.parent
    return sorted(folder.glob("test_*.py"))


def is_killed(mutant: Mutant, copy: Path) -> bool:
    """Whether a test fails, or none ends."""
    target = copy / mutant.path
    kept = target.read_text()
    target.write_text(mutant.source)
    tests = [str(path.relative_to(ROOT)) for path in tests_of(mutant.path)]
    command = [sys.executable, "-m", "pytest", *QUIET, "-m", FEW, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(kept)
    return done.returncode not in (0, 5)  # 5: nothing was selected


def main() -> None:
    """Draw, try, and print how many were killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.source_mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=17)
    options = parser.parse_args()
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutant in drawn(options.count, options.seed):
            found = is_killed(mutant, copy)
            killed += found
            said = "killed  " if found else "survived"
            print(f"{said} {mutant.path}:{mutant.line} {mutant.change}", flush=True)
    print(f"{killed} of {options.count} killed")


if __name__ == "__main__":
    main()
