"""Every rule is broken by some test, and no check raises another."""

from __future__ import annotations

import re
from pathlib import Path

import shardwright.pipeline
from shardwright.pipeline.check import CHECKS
from shardwright.pipeline.rules import RULES

SOURCE = Path(shardwright.pipeline.__file__).parent
TESTS = Path(__file__).parent


def files(folder: Path, pattern: str, without: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if path.stem != without]


def test_every_rule_is_raised_somewhere_and_tested() -> None:
    source = "".join(path.read_text() for path in files(SOURCE, "*.py", "rules"))
    tests = "".join(path.read_text() for path in files(TESTS, "test_*.py", "test_rules"))
    for rule in RULES:
        assert f'"{rule}"' in source, rule
        assert f'"{rule}"' in tests, rule


def test_every_rule_that_is_raised_is_listed() -> None:
    for path in files(SOURCE, "*.py", "rules"):
        for rule in re.findall(r'\bbroken\(\s*"([^"]*)"', path.read_text()):
            assert rule in RULES, (path.name, rule)
    assert {rule for rule, _, _ in CHECKS} <= RULES.keys()
