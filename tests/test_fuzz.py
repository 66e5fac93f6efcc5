"""Drawn programs, each held against eager by the ways through shardwright; and those that failed.

``make fuzz`` draws any number. What a failing program was reduced to is kept in ``fuzz/found/``.
"""

import json
from pathlib import Path

import pytest

from fuzz.case import MismatchError, equal
from fuzz.drive import Child, drive, shortened
from fuzz.grammar import draw
from fuzz.worker import facts_of

FOUND = sorted((Path(__file__).parent.parent / "fuzz" / "found").glob("*.py"))


@pytest.mark.workers
@pytest.mark.timeout(600)
def test_programs_that_failed_once_are_right_or_refused_in_every_way() -> None:
    tally = drive(
        {"seed": number, "text": path.read_text(), "share": 100.0, "name": path.name}
        for number, path in enumerate(FOUND)
    )
    failed = [(FOUND[number].name, way, reason) for number, way, reason in tally.failed]
    assert failed == []
    assert tally.invalid == []
    assert tally.programs == len(FOUND)


PROGRAMS = 200
SHARE = 0.5
"""Of the ways that `make fuzz` goes with each program."""


@pytest.mark.workers
@pytest.mark.timeout(900)
def test_drawn_programs_compute_what_eager_computes() -> None:
    tally = drive(({"seed": seed, "share": SHARE} for seed in range(PROGRAMS)), processes=2)
    print(tally)
    assert tally.failed == []
    assert tally.programs == PROGRAMS
    assert tally.right > 2 * PROGRAMS
    assert len(tally.invalid) < PROGRAMS / 20


def test_a_seed_draws_the_same_program_again() -> None:
    first, again = draw(7), draw(7)
    assert first == again
    assert facts_of(first.text) == first.facts
    assert draw(8).text != first.text


CRASHING = """import ctypes
FACTS = {"rows": 4, "dtype": "float64", "trains": False, "autocast": False, "dropout": False}


def arguments(seed):
    return (), {}


def build():
    ctypes.string_at(0)
"""


def test_a_crash_is_the_failure_of_its_program_and_the_next_one_runs(tmp_path: Path) -> None:
    worker = Child("fuzz.worker")
    common = {"folder": str(tmp_path), "ways": ["stages"]}
    crashed = list(worker.ask(json.dumps({"seed": 0, "text": CRASHING, **common})))
    assert [answer["kind"] for answer in crashed] == ["failed"]
    assert "crashed with status -11" in crashed[0]["reason"]
    answers = list(worker.ask(json.dumps({"seed": 3, **common})))
    worker.close()
    assert answers[-1]["kind"] in ("right", "refused")


def test_a_hang_ends_with_the_limit(tmp_path: Path) -> None:
    worker = Child("fuzz.worker")
    text = CRASHING.replace("ctypes.string_at(0)", "import time; time.sleep(1000)")
    request = {"seed": 0, "text": text, "folder": str(tmp_path)}
    (answer,) = worker.ask(json.dumps(request), limit=1)
    assert (answer["kind"], answer["reason"]) == ("failed", "hung for 1 s")


@pytest.mark.parametrize("found", ["[1.0]", "(1.0, 2.5)", "(1.0, 2)", "{'a': 1.0}"])
def test_structures_and_values_that_differ_are_seen(found: str) -> None:
    with pytest.raises(MismatchError):
        equal("x", eval(found), (1.0, 2.0), 1e-9)


def test_reasons_of_one_defect_are_alike() -> None:
    one = "PlanError: '/tmp/a1' in 3 stages of [4, 5]\nand more"
    other = "PlanError: '/tmp/b' in 12 stages of [1]"
    assert shortened(one) == shortened(other)
