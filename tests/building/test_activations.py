"""What a stage keeps of its forward, block by block."""

from shardwright.building.recompute import demand, stages_of
from tests.building.written_slots import B0, F0, Slots


def two_layers():
    """Two layers of exp and neg, whose backward reads what both make; and a scale for both."""
    made = Slots(1)
    x = made.input("d0")
    scale = made.call("d0", F0, "sigmoid.default", x)
    inside = []
    for _ in range(2):
        made.border("d0", F0)
        inside.append(made.call("d0", F0, "exp.default", x))
        x = made.call("d0", F0, "mul.Tensor", inside[-1], scale)
    for value in (x, *reversed(inside)):
        made.call("d0", B0, "mul.Tensor", value, scale)
    return made


def names(stage, value_ids):
    return sorted(stage.graph.values[value_id].name for value_id in value_ids)


def test_a_stage_is_seen_in_blocks():
    (stage,) = stages_of(two_layers().localized())
    assert [len(block.nodes) for block in stage.blocks] == [1, 2, 2]
    assert [names(stage, block.needed) for block in stage.blocks] == [
        ["sigmoid"],
        ["exp"],
        ["exp__1", "mul__1"],
    ]


def test_what_crosses_from_block_to_block_is_kept():
    (stage,) = stages_of(two_layers().localized())
    assert [names(stage, block.fixed) for block in stage.blocks] == [["sigmoid"], ["mul"], []]
    found = [demand(block, ()) for block in stage.blocks]
    assert [names(stage, one.kept) for one in found] == [["sigmoid"], ["x"], ["mul", "sigmoid"]]
    assert [len(one.again) for one in found] == [0, 1, 2]


def test_what_is_kept_needs_nothing_done_again():
    (stage,) = stages_of(two_layers().localized())
    found = demand(stage.blocks[1], stage.blocks[1].needed)
    assert (names(stage, found.kept), found.again) == (["exp"], ())


def test_what_depends_on_a_renewed_constant_is_kept():
    made = Slots(1)
    count = made.stored("d0", "count")
    y = made.call("d0", F0, "mul.Tensor", made.input("d0"), count)
    z = made.call("d0", F0, "exp.default", y)
    made.update("d0", count, made.call("d0", F0, "neg.default", count))
    made.call("d0", B0, "neg.default", z)
    (stage,) = stages_of(made.localized())
    found = demand(stage.blocks[0], ())
    assert names(stage, found.kept) == ["mul"]


def test_bytes_count_views_of_one_tensor_once():
    made = Slots(1)
    y = made.call("d0", F0, "exp.default", made.input("d0"))
    view = made.call("d0", F0, "view.default", y, [2, 8])
    for value in (y, view):
        made.call("d0", B0, "neg.default", value)
    (stage,) = stages_of(made.localized())
    assert stage.kept_bytes(demand(block, block.needed) for block in stage.blocks) == 64
