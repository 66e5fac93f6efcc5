"""What a replay takes of a feed, and what warming up leaves alone."""

import pytest
import torch
from torch import Tensor

from shardwright.compiler.replay import Replaying, take_feed, warm_up
from shardwright.errors import ExecError, InputError
from shardwright.kernels.lowered import ValueSpec

CPU = torch.device("cpu")
KNOWN = {
    "x": ValueSpec(0, "x", (2, 3), "f32", "input"),
    "w": ValueSpec(1, "w", (3,), "f32", "param"),
    "step": ValueSpec(2, "step", (), "f32", "state"),
    "lr": ValueSpec(3, "lr", (), "f64", "input"),
}


def feed(**tensors: Tensor) -> dict[str, Tensor]:
    return {"x": torch.ones(2, 3), **tensors}


def test_in_training_weights_and_state_of_a_feed_are_left_out() -> None:
    given = feed(w=torch.ones(3), step=torch.ones(()), lr=torch.ones((), dtype=torch.float64))
    found = take_feed(given, KNOWN, Replaying("train"), CPU)
    assert list(found) == ["x", "lr"]
    assert found["x"] is given["x"]


def test_roles_to_copy_are_taken_in_inference() -> None:
    replaying = Replaying(copy_roles=frozenset({"input", "param"}))
    found = take_feed(feed(w=torch.ones(3)), KNOWN, replaying, CPU, optional=("lr",))
    assert list(found) == ["x", "w"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": torch.ones(2, 3), "z": torch.ones(1)}, "the feed has 'z'.*inputs are x, lr"),
        ([torch.ones(2, 3)], "a feed is a list, but tensors are fed by name"),
        ({"x": 3}, "input 'x' is a int, no tensor; feed a tensor of f32"),
        ({"w": torch.ones(3)}, "input 'x' is not in the feed"),
        ({"x": torch.ones(2, 3, dtype=torch.float64)}, "input 'x' is f64.*made for f32"),
        ({"x": torch.ones(2, 3, device="meta")}, "input 'x' is on meta.*runs on cpu"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        take_feed(given, KNOWN, Replaying(), CPU, optional=("lr",))


def test_a_stored_value_keeps_its_shape() -> None:
    replaying = Replaying(copy_roles=frozenset({"input", "param"}))
    with pytest.raises(InputError, match=r"param 'w' is f32\[4\].*f32\[3\]"):
        take_feed(feed(w=torch.ones(4)), KNOWN, replaying, CPU, optional=("lr",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "eval"}, "mode 'eval'"),
        ({"bound": 0}, "bound=0; it is a whole number from 1 up"),
        ({"bound": 2.5}, r"bound=2\.5"),
        ({"warm_up": -1}, "warm_up=-1; it is a whole number from 0 up"),
        ({"static_roles": {"parm"}}, r"static_roles has \['parm'\].*param, buffer"),
        ({"static_roles": None}, "static_roles=None; it is a set of roles"),
        ({"copy_roles": "input"}, "copy_roles='input'; it is a set of roles"),
        ({"copy_roles": ["input", ["param"]]}, r"copy_roles has \[\['param'\]\]"),
        ({"mode": ["train"]}, r"mode \['train'\]"),
        ({"copy_roles": frozenset({"param"})}, "lacks 'input'"),
        ({"copy_roles": frozenset({"input", "tmp"})}, r"\['tmp'\]"),
        ({"mode": "train", "copy_roles": frozenset({"input", "state"})}, "inputs alone"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(ExecError, match=message):
        Replaying(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("collection", [set, list, tuple])
def test_roles_come_in_any_collection(collection: type) -> None:
    roles = collection(["param", "input"])
    made = Replaying(copy_roles=roles, static_roles=roles)
    assert made == Replaying(copy_roles=frozenset(roles), static_roles=frozenset(roles))


def test_a_mode_is_the_programs_or_none() -> None:
    assert Replaying().of_mode("train") == Replaying("train")
    assert Replaying("train", bound=2).of_mode("train").bound == 2
    with pytest.raises(ExecError, match="mode 'train', but the program is for inference"):
        Replaying("train").of_mode("inference")
    with pytest.raises(ExecError, match="inputs alone"):
        Replaying(copy_roles=frozenset({"input", "param"})).of_mode("train")


def test_warming_up_leaves_tensors_and_random_numbers_as_they_were() -> None:
    torch.manual_seed(0)
    weight, runs = torch.nn.Parameter(torch.ones(3)), []

    def run() -> None:
        with torch.no_grad():
            weight.add_(torch.rand(3))
        runs.append(weight.detach().clone())

    before = torch.get_rng_state()
    warm_up(run, 2, [weight], CPU)
    assert len(runs) == 2
    assert not torch.equal(runs[0], runs[1])
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_they_are_restored_where_a_run_fails_too() -> None:
    tensor = torch.zeros(2)

    def fail() -> None:
        tensor.fill_(1.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warm_up(fail, 1, [tensor], CPU)
    assert torch.equal(tensor, torch.zeros(2))
