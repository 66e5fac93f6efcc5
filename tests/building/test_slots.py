"""What of slots' work is read in the end."""

from shardwright.building.slots import live_parts
from tests.building.written_slots import F0, UPDATE, Slots, part


def names(made, device, live):
    values = made.slots[device].builder.graph.values
    return sorted(
        values[node.outputs[0]].name
        for node in made.slots[device].builder.graph.nodes
        if node.id in live[device].nodes
    )


def test_what_leads_to_an_output_is_live():
    made = Slots(1)
    y = made.call("d0", F0, "relu.default", made.input("d0"))
    made.call("d0", F0, "exp.default", y)
    made.outputs.append([part("d0", made.call("d0", F0, "neg.default", y))])
    assert names(made, "d0", live_parts(made.localized())) == ["neg", "relu"]


def test_a_message_is_live_with_what_reads_it():
    made = Slots(2)
    read = made.call("d0", F0, "relu.default", made.input("d0"))
    unread = made.call("d0", F0, "exp.default", read)
    got = made.send(read, "d0", F0, "d1", F0)
    made.send(unread, "d0", F0, "d1", F0)
    made.outputs.append([part("d1", made.call("d1", F0, "neg.default", got))])
    live = live_parts(made.localized())
    assert live["d0"].communications == live["d1"].communications == {made.communications[0]}
    assert names(made, "d0", live) == ["relu"]


def test_new_contents_are_live_where_the_old_are_read():
    made = Slots(1)
    read, unread = made.stored("d0", "read"), made.stored("d0", "unread")
    y = made.call("d0", F0, "relu.default", read)
    made.outputs.append([part("d0", y)])
    made.update("d0", read, made.call("d0", UPDATE, "neg.default", read))
    made.update("d0", unread, made.call("d0", UPDATE, "exp.default", read))
    assert names(made, "d0", live_parts(made.localized())) == ["neg", "relu"]
