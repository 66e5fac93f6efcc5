"""From which sizes on a model makes the calls of its graph: against the model itself."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.tracing import capture
from shardwright.tracing.padding import padded_rows
from shardwright.tracing.sizes import trace_sizes

ROWS = 8


class Model(nn.Module):
    """One function of its input and a linear layer."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.one, self.two = torch.tensor(1.0), torch.tensor(2.0)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("wide", torch.randn(4, ROWS))
        self.register_buffer("table", torch.randn(20, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def counts(model: nn.Module, x: Tensor) -> Tensor:
    model.seen.add_(torch.ones(x.shape[0]).sum())
    return x * 2


def chooses(model: nn.Module, x: Tensor) -> Tensor:
    first, second = x.sin(), x.cos()
    return (first if x.shape[0] == 1 else second) * 2


def writes(model: nn.Module, x: Tensor) -> Tensor:
    part = model.wide[:, : x.shape[0]]
    part += 1
    total = model.wide.sum()
    return x + total


def pads(model: nn.Module, x: Tensor) -> Tensor:
    made = torch.zeros(ROWS, 4)
    made[: x.shape[0]] = x
    return made


def looks_up(model: nn.Module, x: Tensor) -> Tensor:
    try:
        return x * {4: 3.0}[x.shape[0]]
    except (KeyError, TypeError):
        return x


PADDED = {
    "layer": (lambda m, x: m.layer(x).relu(), 1),
    "branch below 6": (lambda m, x: x * (2 if x.shape[0] < 6 else 1), 6),
    "branch at 1": (lambda m, x: x * (2 if x.shape[0] == 1 else 1), 2),
    "two tensors": (chooses, 2),
    "expanded unless 1": (
        lambda m, x: x + (m.layer.bias if x.shape[0] == 1 else m.layer.bias.expand(len(x.T[0]), 4)),
        ROWS,
    ),
    "two weights": (lambda m, x: (m.first if x.shape[0] == 1 else m.second)(x), 2),
    "two constants": (lambda m, x: x * (m.one if x.shape[0] == 1 else m.two), 2),
    "squeezed": (lambda m, x: x.squeeze(), 2),
    "token": (
        lambda m, x: torch.cat([m.layer.weight[None].expand(x.shape[0], -1, -1), x[:, None]], 1),
        1,
    ),
    "slice": (lambda m, x: x + m.table[: x.shape[0]], 1),
    "repeated": (lambda m, x: torch.cat([m.first.bias.repeat(x.shape[0], 1), x], 1), 1),
    "of its dtype": (lambda m, x: (x + x.new_zeros(x.shape[0], 4)).type_as(x), 1),
    "group norm": (lambda m, x: torch.group_norm(x, 2), 1),
    "by numbers": (
        lambda m, x: x[:, None][torch.arange(x.shape[0])[:, None], x[:, :1].long() * 0],
        1,
    ),
    "numbered": (lambda m, x: x + torch.arange(x.shape[0])[:, None], 1),
}
REFUSED = {
    "part that is all": (
        lambda m, x: x + m.wide[:, : x.shape[0]].sum(1),
        "takes a part that is all of it",
    ),
    "written part that is all": (writes, "takes a part that is all of it"),
    "padded to the example": (pads, "takes a part that is all of it"),
    "many numbers": (
        lambda m, x: (x, torch.arange(4 * x.shape[0]).view(4, -1)),
        "depends on how many",
    ),
    "text": (lambda m, x: x * {"2": 0.5}.get(f"{x.shape[0]}", 1.0), "a text or a key"),
    "texts": (lambda m, x: x * (2 if str(tuple(x.shape)) == "(4, 4)" else 1), "a text or a key"),
    "key": (looks_up, "a text or a key"),
    "kind": (lambda m, x: x * (x.shape[0] if isinstance(x.shape[0], int) else 8), "other calls"),
    "divided": (lambda m, x: x / x.shape[0], "computes with a size"),
    "of all elements": (lambda m, x: x / x.numel(), "computes with a size"),
    "filled": (lambda m, x: x * torch.full((1,), x.shape[0]), "computes with a size"),
    "float": (lambda m, x: x * float(x.shape[0]), "asks for the size itself"),
    "constant": (lambda m, x: x * torch.tensor(float(x.shape[0])), "asks for the size itself"),
    "loop": (lambda m, x: sum(x[i] for i in range(x.shape[0])), "asks for the size itself"),
    "halves": (
        lambda m, x: torch.cat([x[: x.shape[0] // 2], x[x.shape[0] // 2 :]]),
        "computes with a size",
    ),
    "every other row": (lambda m, x: x[::2], "slice mixes the rows"),
    "diagonal": (lambda m, x: x.diagonal(), "diagonal .*mix"),
    "even": (lambda m, x: x * (2 if x.shape[0] % 2 == 0 else 1), "asks for the size itself"),
    "int": (lambda m, x: x * (2 if isinstance(x.shape[0], int) else 1), "makes other calls"),
    "ones": (lambda m, x: x * torch.ones(x.shape[0]).sum(), "computes with the number"),
    "from the end": (
        lambda m, x: x + torch.arange(x.shape[0]).flip(0)[:, None],
        "computes with the number",
    ),
    "pairs": (
        lambda m, x: x * (x[:, None, :1] * torch.ones(1, x.shape[0], 1)).sum(1),
        "computes with the number",
    ),
    "slice's end": (lambda m, x: x + m.table[: x.shape[0]].flip(0), "computes with the number"),
    "result": (lambda m, x: (x * 2, x.shape[0]), "torch.SymInt"),
    "buffer": (counts, "'add' depends on how many"),
    "mean": (lambda m, x: x - x.mean(0), "mean mixes the rows"),
}


def rows_from(function: Callable[[nn.Module, Tensor], Tensor]) -> int:
    graph = capture(Model(function).eval(), (torch.randn(ROWS, 4),))
    return padded_rows(graph, ["x"])[0]


@pytest.mark.parametrize("name", PADDED)
def test_the_least_rows_that_may_be_padded(name: str) -> None:
    """Fewer give, padded, not what the model gives for them; these do."""
    function, least = PADDED[name]
    if least == ROWS:
        with pytest.raises(InputError):
            rows_from(function)
        return
    assert rows_from(function) == least
    model = Model(function).eval()
    for rows in range(least, ROWS + 1):
        x = torch.randn(rows, 4)
        whole = torch.cat([x, x[-1:].expand(ROWS - rows, -1)])
        with torch.no_grad():
            torch.testing.assert_close(model(whole)[:rows], model(x))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_number_of_rows_changes_is_not_padded(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(InputError, match=said):
        rows_from(function)


def test_the_line_that_computes_with_a_size_is_named() -> None:
    with pytest.raises(InputError, match=r"test_sizes.py:\d+ .*x / x.shape\[0\].*aten.div"):
        rows_from(REFUSED["divided"][0])
    with pytest.raises(InputError, match=r"test_sizes.py:\d+ .*float\(x.shape\[0\]\)"):
        rows_from(REFUSED["float"][0])


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shared = x.shape[0] * x.shape[1] > 10
        return x + y * (2 if shared else 1)


def test_a_question_about_two_sizes() -> None:
    graph = capture(Pair(), (torch.randn(6, 4), torch.randn(6, 4)))
    both = {"batch": {"x": (0,), "y": (0,)}, "length": {"x": (1,), "y": (1,)}}
    with pytest.raises(InputError, match=r"test_sizes.py:\d+ .*several sizes at once"):
        trace_sizes(graph, both)
    assert trace_sizes(graph, {"batch": both["batch"]})["batch"].least == 3


def test_the_model_is_what_it_was_at_capture_and_stays_as_it_is() -> None:
    model = Model(PADDED["layer"][0])
    graph = capture(model.eval(), (torch.randn(ROWS, 4),))
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    model.function = PADDED["branch at 1"][0]
    model.train()
    assert padded_rows(graph, ["x"]) == (1, {"output": 0})
    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == before
    model.double()
    with pytest.raises(InputError, match=r"changed after it was captured: its 'layer.weight'"):
        padded_rows(graph, ["x"])


def test_a_model_that_cannot_be_copied() -> None:
    model = Model(PADDED["layer"][0])
    model.lock = threading.Lock()
    graph = capture(model.eval(), (torch.randn(ROWS, 4),))
    with pytest.raises(InputError, match="the model cannot be copied"):
        padded_rows(graph, ["x"])
