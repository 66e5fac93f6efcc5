"""Chains of calls as loops, and modules that stand beside one another as one expression."""

import pytest

from shardwright.codegenerate.writing.construction import module_dict, sequential
from shardwright.codegenerate.writing.forward import SiblingCall, as_loop, chains, number_range


def call(key: str, *arguments: int, result: int, constructor: str = "Block()") -> SiblingCall:
    return SiblingCall(arguments, (result,), constructor, "self.h", key)


CHAIN = [call("0", 1, 9, result=2), call("1", 2, 9, result=3), call("2", 3, 9, result=4)]
USES = {1: 1, 2: 1, 3: 1, 4: 1, 9: 3}


def test_a_chain_is_found_and_what_it_carries() -> None:
    assert chains(CHAIN, USES) == [(0, 3, 0)]
    assert chains([None, *CHAIN, None], USES) == [(1, 4, 0)]


def test_a_result_that_others_read_ends_a_chain() -> None:
    assert chains(CHAIN, {**USES, 3: 2}) == [(0, 2, 0)]


def test_other_arguments_end_a_chain() -> None:
    assert chains([CHAIN[0], CHAIN[1], call("2", 3, 8, result=4)], USES) == [(0, 2, 0)]


def test_another_class_begins_another_chain() -> None:
    others = [
        call("2", 3, 9, result=4, constructor="Other()"),
        call("3", 4, 9, result=5, constructor="Other()"),
    ]
    assert chains([*CHAIN[:2], *others], {**USES, 5: 1}) == [(0, 2, 0), (2, 4, 0)]


def test_the_argument_that_is_carried_stays_the_same() -> None:
    turned = [CHAIN[0], CHAIN[1], call("2", 9, 3, result=4)]
    assert chains(turned, USES) == [(0, 2, 0)]


def test_all_of_a_dictionary_are_its_values_and_some_are_a_range() -> None:
    whole = as_loop(CHAIN, 0, ["0", "1", "2"])
    assert (whole.over, whole.item, whole.callee) == ("self.h.values()", "block", "block")
    part = as_loop(CHAIN, 0, ["0", "1", "2", "3"])
    assert (part.over, part.callee) == ("range(3)", "self.h[str(i)]")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["0", "1"], "range(2)"),
        (["3", "4", "5"], "range(3, 6)"),
        (["3", "5"], None),
        (["a"], None),
        (["01"], None),
    ],
)
def test_ranges(keys: list[str], expected: str | None) -> None:
    assert number_range(keys) == expected


def test_dictionaries_of_equal_modules_are_comprehensions() -> None:
    blocks = [(str(i), "Block()") for i in range(6, 12)]
    assert module_dict(blocks) == "nn.ModuleDict({str(i): Block() for i in range(6, 12)})"
    mixed = module_dict([("5", "First()"), *blocks])
    assert mixed == 'nn.ModuleDict({"5": First(), **{str(i): Block() for i in range(6, 12)}})'
    assert module_dict(blocks[:2]) == 'nn.ModuleDict({"6": Block(), "7": Block()})'


def test_sequentials_whole_and_in_part() -> None:
    assert sequential([("0", "nn.ReLU()"), ("1", "B()")]) == "nn.Sequential(nn.ReLU(), B())"
    assert sequential([("1", "A()"), ("3", "B()")]) == (
        'nn.Sequential(OrderedDict({"1": A(), "3": B()}))'
    )
    four = [(str(i), "A()") for i in range(4)]
    assert sequential(four) == "nn.Sequential(*(A() for _ in range(4)))"
    assert sequential(four[1:]) == (
        "nn.Sequential(OrderedDict({str(i): A() for i in range(1, 4)}))"
    )
