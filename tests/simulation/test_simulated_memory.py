"""What a slot holds in simulated time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwright.engine.program import slot_program
from shardwright.simulation.memory import (
    HeldValues,
    Ledger,
    SimulatedStorage,
    hold_constants,
)
from tests.runtime.linear_step import WIDTH, linear_step


def test_a_storage_lives_as_long_as_a_tensor_lies_there() -> None:
    ledger = Ledger("d0")
    constants, found = HeldValues(ledger), HeldValues(ledger)
    constants["w"] = SimulatedStorage(10, "parameters")
    found["x"] = found["view"] = SimulatedStorage(100, "activations")
    ledger.note(0)
    found.pop("x")
    assert ledger.held["activations"] == 100
    found.pop("view")
    found.pop("view", None)
    assert ledger.held["activations"] == 0
    ledger.note(50)
    assert (ledger.memory().parameters, ledger.memory().activations) == (10, 100)
    assert ledger.memory().total == 110
    ledger.note(150)
    assert (ledger.memory().activations, ledger.memory().temporaries) == (0, 150)


def test_memory_for_messages_is_kept_and_used_again() -> None:
    sender, receiver = Ledger("d0"), Ledger("d1")
    first, second = sender.lend(1000, 1), sender.lend(1000, 1)
    values = HeldValues(receiver)
    for name, block in (("a", first), ("b", second)):
        values[name] = receiver.see(block)
    assert sender.held["messages"] == receiver.held["messages"] == 2 * first.nbytes
    values.pop("a")
    assert receiver.held["messages"] == 2 * first.nbytes, "it stays mapped"
    assert sender.lend(1000, 2) is first
    assert sender.lend(1000, 1) not in (first, second)
    assert sender.held["messages"] == 3 * first.nbytes


def test_a_message_to_several_is_held_by_each() -> None:
    sender, receivers = Ledger("d0"), [Ledger(f"d{k}") for k in (1, 2)]
    block = sender.lend(64, 2)
    seen = [receiver.see(block) for receiver in receivers]
    for receiver, storage in zip(receivers, seen, strict=True):
        receiver.hold(storage)
    receivers[0].drop(seen[0])
    assert sender.lend(64, 1) is not block
    receivers[1].drop(seen[1])
    assert sender.lend(64, 1) is block


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_all_that_is_held_can_be_let_go_of(acts: list[tuple[int, int]]) -> None:
    ledger = Ledger("d0")
    storages = [SimulatedStorage(7 * k, "activations") for k in range(4)]
    values = HeldValues(ledger)
    for storage, place in acts:
        values[place] = storages[storage]
        used = {id(storage) for storage in values.values()}
        assert ledger.held["activations"] == sum(s.nbytes for s in storages if id(s) in used)
    values.clear()
    assert set(ledger.held.values()) == {0}


def test_what_constants_are() -> None:
    found = hold_constants(Ledger("d0"), slot_program(linear_step(), "d0"))
    assert {name: (storage.nbytes, storage.item) for name, storage in found.items()} == {
        "w0.0": (8 * WIDTH * WIDTH, "parameters"),
        "g0.0": (8 * WIDTH * WIDTH, "gradients"),
        "m0.0": (8 * WIDTH * WIDTH, "optimizer"),
    }
