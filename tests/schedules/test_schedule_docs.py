"""The tables that docs/schedules.md prints are those that the package makes."""

import re
from pathlib import Path

import pytest

from shardwright.schedules import KINDS, format_schedule, make_schedule, simulate

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
TABLE = re.compile(
    r"^```text\n((\S+): ranks (\d+), [^\n]* microbatches (\d+)\n.*?)^```$", re.MULTILINE | re.DOTALL
)
TABLES = TABLE.findall(PAGE)


def test_the_page_shows_every_kind() -> None:
    assert {kind for _, kind, _, _ in TABLES} == {*KINDS}


@pytest.mark.parametrize(("table", "kind", "ranks", "microbatches"), TABLES)
def test_a_table_of_the_page(table: str, kind: str, ranks: str, microbatches: str) -> None:
    schedule = make_schedule(kind, ranks=int(ranks), microbatches=int(microbatches))
    assert format_schedule(schedule) + "\n" == table


@pytest.mark.parametrize("kind", KINDS)
def test_the_bubbles_of_the_page(kind: str) -> None:
    bubbles = (
        simulate(make_schedule(kind, ranks=4, microbatches=microbatches)).bubble
        for microbatches in (4, 8, 16)
    )
    assert f"| `{kind}` | {', '.join(f'{bubble:.1%}' for bubble in bubbles)} |" in PAGE
