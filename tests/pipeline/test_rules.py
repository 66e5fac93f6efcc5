"""Every rule is broken by some test, and no check raises another."""

from __future__ import annotations

import re
from pathlib import Path

import shardwright.pipeline
from shardwright.pipeline.rules import RULES

SOURCES = Path(shardwright.pipeline.__file__).parent
TESTS = Path(__file__).parent


def test_every_rule_is_raised_somewhere_and_tested() -> None:
    source = "".join(path.read_text() for path in SOURCES.glob("*.py") if path.stem != "rules")
    tests = "".join(path.read_text() for path in TESTS.glob("test_*.py") if path != Path(__file__))
    computed = {"one-input-task", "one-output-task"}  # raised as one-{kind}-task
    for rule in RULES:
        assert f'"{rule}"' in source or rule in computed, rule
        assert f'"{rule}"' in tests, rule


def test_every_rule_that_is_raised_is_listed() -> None:
    for path in SOURCES.glob("*.py"):
        for rule in re.findall(r'\bbroken\(\s*"([^"]*)"', path.read_text()):
            assert rule in RULES, (path.name, rule)
