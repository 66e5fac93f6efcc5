import math

import pytest
from hypothesis import given

from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from tests.sharding.simulation import meshes

GRID = Mesh.of({"data": 2, "tensor": 3})


def test_a_mesh_prints_its_axes_and_slots():
    assert str(GRID) == "data 2 × tensor 3: d0 d1 d2 d3 d4 d5"
    assert str(Mesh.of({}, ["d7"])) == "one slot: d7"
    assert str(Mesh.of({"x": 40})) == "x 40: d0 d1 … d39"


def test_groups_along_an_axis():
    assert GRID.groups(0) == (("d0", "d3"), ("d1", "d4"), ("d2", "d5"))
    assert GRID.groups(1) == (("d0", "d1", "d2"), ("d3", "d4", "d5"))


def test_coordinates_are_row_major():
    assert GRID.coordinate("d4") == (1, 1)
    assert GRID.axis("tensor") == 1


def test_the_meshes_along_a_pipeline_axis_are_its_stages():
    stages = Mesh.of({"pipeline": 2, "tensor": 2}).along(0)
    assert list(map(str, stages)) == ["tensor 2: d0 d1", "tensor 2: d2 d3"]
    assert list(map(str, Mesh.of({"pipeline": 2}).along(0))) == ["one slot: d0", "one slot: d1"]


@given(meshes())
def test_groups_hold_the_slots_that_differ_in_one_coordinate(mesh):
    assert mesh.ndim == len(mesh.sizes)
    for axis, size in enumerate(mesh.sizes):
        groups = mesh.groups(axis)
        assert sorted(device for group in groups for device in group) == sorted(mesh.devices)
        assert len(groups) == math.prod(mesh.sizes) // size
        for group in groups:
            found = [mesh.coordinate(device) for device in group]
            assert [coordinate[axis] for coordinate in found] == list(range(size))
            assert len({c[:axis] + c[axis + 1 :] for c in found}) == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mesh(("x",), (2, 2), ("a",)), "1 axes, but 2 sizes"),
        (lambda: Mesh.of(dict.fromkeys("wxyz", 1)), "4 axes; at most 3"),
        (lambda: Mesh(("x", "x"), (1, 1), ("a",)), "the axis 'x' twice"),
        (lambda: Mesh.of({"x": 2}, ["a", "a"]), "the device slot 'a' twice"),
        (lambda: Mesh.of({"x": 0}), "axis 'x' must have a size from 1 up, found 0"),
        (lambda: Mesh.of({"x": 2, "y": 3}, ["a"]), "x 2 × y 3 needs 6 device slots, found 1"),
        (lambda: GRID.axis("time"), "has no axis 'time'"),
        (lambda: GRID.coordinate("e0"), "'e0' is not in the mesh"),
    ],
)
def test_what_is_no_mesh_is_refused(build, message):
    with pytest.raises(PlanError, match=message):
        build()
