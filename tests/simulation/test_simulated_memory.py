"""What a slot holds in simulated time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwright.engine.slot_steps import slot_steps
from shardwright.simulation.simulated_memory import Ledger, SimulatedStorage, constant_items
from tests.runtime.linear_step import WIDTH, linear_step


def test_a_storage_lives_as_long_as_a_tensor_lies_there() -> None:
    ledger = Ledger("d0", {"w": (10, "parameters")})
    shared = SimulatedStorage(100, "activations")
    ledger.hold("x", shared)
    ledger.hold("view", shared)
    ledger.note(0)
    ledger.drop("x")
    assert ledger.held["activations"] == 100
    ledger.drop("view")
    ledger.drop("view")
    assert ledger.held["activations"] == 0
    ledger.note(50)
    assert (ledger.memory().parameters, ledger.memory().activations) == (10, 100)
    assert ledger.memory().total == 110
    ledger.note(150)
    assert (ledger.memory().activations, ledger.memory().temporaries) == (0, 150)


def test_memory_for_messages_is_kept_and_used_again() -> None:
    sender, receiver = Ledger("d0", {}), Ledger("d1", {})
    first, second = sender.lend(1000, 1), sender.lend(1000, 1)
    for place, block in (("a", first), ("b", second)):
        receiver.hold(place, receiver.see(block))
    assert sender.held["messages"] == receiver.held["messages"] == 2 * first.nbytes
    receiver.drop("a")
    assert receiver.held["messages"] == 2 * first.nbytes, "it stays mapped"
    assert sender.lend(1000, 2) is first
    assert sender.lend(1000, 1) not in (first, second)
    assert sender.held["messages"] == 3 * first.nbytes


def test_a_message_to_several_is_held_by_each() -> None:
    sender, receivers = Ledger("d0", {}), [Ledger(f"d{k}", {}) for k in (1, 2)]
    block = sender.lend(64, 2)
    for receiver in receivers:
        receiver.hold("x", receiver.see(block))
    receivers[0].drop("x")
    assert sender.lend(64, 1) is not block
    receivers[1].drop("x")
    assert sender.lend(64, 1) is block


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_all_that_is_held_can_be_let_go_of(acts: list[tuple[int, int]]) -> None:
    ledger = Ledger("d0", {})
    storages = [SimulatedStorage(7 * k, "activations") for k in range(4)]
    for storage, place in acts:
        ledger.hold(place, storages[storage])
        used = {id(ledger.storage(p)) for p in range(5) if p in ledger}
        assert ledger.held["activations"] == sum(s.nbytes for s in storages if id(s) in used)
    for place in range(5):
        ledger.drop(place)
    assert set(ledger.held.values()) == {0}


def test_what_constants_are() -> None:
    pipeline = linear_step()
    found = constant_items(slot_steps(pipeline, "d0"))
    nbytes = 8 * WIDTH * WIDTH
    assert found == {
        "w0.0": (nbytes, "parameters"),
        "g0.0": (nbytes, "gradients"),
        "m0.0": (nbytes, "optimizer"),
    }
