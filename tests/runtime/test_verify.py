from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import VerifyError
from shardwright.runtime.verify import Rounding, compare, other_weights, verify
from tests.runtime.sketch import chain, chain_result, chain_weight

X = torch.randn(3, 4)
NAN, INF = float("nan"), float("inf")


class Transposed(nn.Module):
    """A layer of what is no batch of rows in memory."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(0, 1)).tanh()


def test_equal() -> None:
    report = verify(chain(3), lambda x: chain_result(x, 3), (X,))
    assert report.equal
    assert [d.output for d in report.outputs] == ["output"]
    assert str(report).startswith("output: equal (largest value ")


def test_different() -> None:
    with pytest.raises(VerifyError, match=r"tolerance 0\):\noutput: differs by"):
        verify(chain(2), lambda x: chain_result(x, 2) * (1 + 1e-5), (X,))
    assert verify(
        chain(2), lambda x: chain_result(x, 2) * (1 + 1e-5), kwargs={"x": X}, tolerance=1e-4
    ).equal


@pytest.mark.parametrize(
    ("alignment", "factor", "tolerance", "said"),
    [
        (True, 1 + 2**-21, 0.0, True),
        (False, 1 + 2**-21, 0.0, False),
        (True, 1 + 1e-4, 0.0, False),  # more than rounding
        (True, 1 + 2**-21, 1e-8, False),  # the caller knows of tolerances
    ],
)
def test_what_to_do_about_rounding_is_said(
    alignment: bool, factor: float, tolerance: float, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Rounding(by_alignment=alignment, by_layout=False)
    monkeypatch.setattr(sys.modules[verify.__module__], "rounding", lambda: found)
    with pytest.raises(VerifyError, match="differs by") as caught:
        verify(chain(2), lambda x: chain_result(x, 2) * factor, (X,), tolerance=tolerance)
    assert ("set MKL_CBWR=AUTO before Python starts" in str(caught.value)) == said


def test_another_structure() -> None:
    """Where a file says how results are nested; else there are as many, in order."""
    graph = sw.capture(nn.ReLU(), (X,))
    with pytest.raises(VerifyError, match="another structure"):
        verify(sw.build(graph, sw.plan(graph, devices=1)), lambda x: (x.relu(),), (X,))
    assert verify(chain(2), lambda x: (chain_result(x, 2),), (X,)).equal
    with pytest.raises(VerifyError, match="another structure"):
        verify(chain(2), lambda x: (chain_result(x, 2), x), (X,))


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "equal", "largest"),
    [
        ([1.0, NAN], [1.0, NAN], 0, True, 0),
        ([1.0, NAN], [1.0, 2.0], 0, False, INF),
        ([1.0, NAN], [1.0, 2.0], 10.0, False, INF),
        ([INF, -INF], [INF, -INF], 0, True, 0),
        ([INF], [-INF], 1.0, False, INF),
        ([1.0, 4.5], [1.0, 5.0], 0.1, True, 0.5),
        ([1.0, 4.5], [1.0, 5.0], 0.01, False, 0.5),
        ([0.0], [-0.0], 0, True, 0),
        ([], [], 0, True, 0),
    ],
)
def test_compare(found, expected, tolerance, equal, largest) -> None:
    difference = compare("y", torch.tensor(found), torch.tensor(expected), tolerance)
    assert (difference.equal, difference.largest) == (equal, largest)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float8_e4m3fn, torch.bfloat16])
def test_compare_any_dtype(dtype: torch.dtype) -> None:
    a = torch.tensor([0, 1, 1]).to(dtype)
    assert compare("y", a, a.clone(), 0.0).equal
    assert not compare("y", a, torch.tensor([1, 1, 1]).to(dtype), 0.0).equal


def test_large_integers_are_compared_exactly() -> None:
    a = torch.tensor([2**53 + 1])
    assert not compare("y", a, a - 1, 0.0).equal


def test_compare_refuses_other_shapes_and_dtypes() -> None:
    with pytest.raises(VerifyError, match=r"'y' is torch.float32\[2\], the model's is"):
        compare("y", torch.zeros(2), torch.zeros(3), 0.0)
    with pytest.raises(VerifyError, match=r"the model's is torch.float64\[2\]"):
        compare("y", torch.zeros(2), torch.zeros(2).double(), 0.0)


class Counting(nn.Module):
    """A chain of two that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.threads = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.threads = torch.get_num_threads()
        return torch.relu(torch.relu(x @ chain_weight(0).T) @ chain_weight(1).T)


def test_the_model_is_left_as_it_was_and_computes_with_the_workers_threads() -> None:
    model = Counting()
    before = torch.get_num_threads()
    assert verify(chain(2), model, (X,), threads=before + 1).equal
    assert model.calls.item() == 0
    assert model.threads == before + 1
    assert torch.get_num_threads() == before


class Writing(nn.Module):
    """Writes its first argument, which shares memory with the second, and gives a buffer away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x.mul_(0.5).unsqueeze_(0)
        self.seen += 1
        return torch.relu(x) + rows["rows"], self.seen


@pytest.mark.parametrize("learned", [False, True])
def test_what_the_model_writes_is_not_the_callers(learned: bool) -> None:
    model = Writing()
    x = torch.randn(2, 3, requires_grad=learned) * 2
    rows = {"rows": torch.randn(2, 3)}
    before = x.detach().clone(), rows["rows"].clone()
    with pytest.warns(sw.CaptureWarning, match="writes to its input 'x'"):
        graph = sw.capture(model, (x.detach(), rows))
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    assert verify(pipeline, model, (x, rows)).equal
    assert verify(pipeline, model, (x, rows)).equal
    assert torch.equal(x, before[0])
    assert torch.equal(rows["rows"], before[1])


def test_the_models_arguments_share_memory_as_the_callers_do() -> None:
    seen = []
    x = torch.randn(3, 4)

    def model(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x.zero_()
        seen.append(row)
        return x

    with pytest.raises(sw.InputError, match="2 positional arguments"):  # a chain takes one
        verify(chain(2), model, (x, x[0]))
    assert not seen[0].any()
    assert x.any()


@pytest.mark.parametrize(
    "layer",
    [
        Transposed(nn.Linear(4, 12)),  # folded in one product where its weight wants a gradient
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),  # one fused kernel
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_kernels_that_eager_takes_for_weights_with_gradients_are_no_difference(
    layer: nn.Module,
) -> None:
    generator = torch.Generator().manual_seed(0)
    model = layer.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(4, 5, 4, generator=generator, dtype=torch.float64)
    graph = sw.capture(model, (x,))
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    assert verify(pipeline, model, (x,)).equal
    assert verify(pipeline, graph, (x,)).equal
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_weights_than_the_files_are_named() -> None:
    """Outputs that differ for that reason are no error of the pipeline."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    graph = sw.capture(model, (X,))
    pipeline = sw.build(graph, sw.plan(graph, devices=1))
    assert verify(pipeline, model, (X,)).equal
    assert list(other_weights(pipeline, other)) == ["weight", "bias"]
    with pytest.raises(VerifyError, match=r"weights are not the model's \('weight' and 1 more\)"):
        verify(pipeline, other, (X,))
    other.load_state_dict(model.state_dict())
    assert other_weights(pipeline, other) == {}


@pytest.mark.parametrize("trains", [True, False])
def test_random_numbers_of_a_model_in_train_mode_are_named(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(trains)
    graph = sw.capture(model, (X,))
    pipeline = sw.build(graph, sw.plan(graph, devices=1))
    message = r"draws random numbers \(aten.dropout.default\).* call model.eval\(\) before capture"
    with pytest.raises(VerifyError, match=message if trains else r"differs by[^\n]*$"):
        verify(pipeline, lambda x: model(x) * 2, (X,))
