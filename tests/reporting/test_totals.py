from shardwright.pipeline.schema import Document
from shardwright.reporting.tables import SlotTotals, communication_groups, slot_totals


def test_a_slots_work_is_counted_from_shapes(document: Document) -> None:
    weight, activation = 8 * 8 * 4, 4 * 8 * 4
    assert slot_totals(document, "d0") == SlotTotals(
        slot="d0",
        supertasks=3,
        operators=4,
        constants=2,
        stored_bytes=2 * weight,
        sent_bytes=activation,
        received_bytes=0,
    )
    assert slot_totals(document, "d1").received_bytes == activation


def test_a_constant_read_twice_is_counted_once(document: Document) -> None:
    again = document.supertasks["d0.1"]
    document.supertasks["d0.1"] = type(again)("FX", ("h0", "w0"), ("h1",), "d0", data_blob="layer")
    assert slot_totals(document, "d0").constants == 1


def test_members_of_a_group_stand_in_order_of_their_index(document: Document) -> None:
    document.supertasks = dict(reversed(document.supertasks.items()))
    groups = communication_groups(document)
    assert [task.kind for task in groups["g0"]] == ["send", "recv"]
