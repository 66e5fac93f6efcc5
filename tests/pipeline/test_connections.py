"""The index of a document, of good ones and of broken ones."""

from __future__ import annotations

from shardwright.pipeline import SuperTask
from shardwright.pipeline.connections import connect
from tests.pipeline.documents import COLLECTIVES, two_stages


def test_two_stages() -> None:
    found = connect(two_stages())
    assert found.producers["h2@d1"] == ["recv"]
    assert found.users["h2"] == ["send"]
    assert found.groups == {"g0": ["send", "recv"]}
    assert found.order == {"d0": ["d0.0", "d0.1", "send"], "d1": ["recv", "d1.0"]}
    assert found.ends == {"input": ["input"], "output": ["output"]}
    assert found.devices == {
        "x": "d0",
        "w1": "d0",
        "h1": "d0",
        "w2": "d0",
        "h2": "d0",
        "h2@d1": "d1",
        "w3": "d1",
        "y": "d1",
    }


def test_groups_are_in_the_order_of_device_idx() -> None:
    document = COLLECTIVES["all_reduce"]()
    document.supertasks["all_reduce.0"].device_idx = 2
    document.supertasks["all_reduce.2"].device_idx = 0
    assert connect(document).groups["g"] == ["all_reduce.2", "all_reduce.1", "all_reduce.0"]


def test_a_broken_document_is_indexed_as_it_stands() -> None:
    document = two_stages()
    document.supertasks["again"] = SuperTask("FX", ("nothing",), ("h1", "h1"), "nowhere")
    found = connect(document)
    assert found.producers["h1"] == ["d0.0", "again", "again"]
    assert found.order["nowhere"] == ["again"]
