"""A runner of a bundle gives what the model gives, whatever the sizes of its calls."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import shardwright as sw
from shardwright.errors import InputError, RunError, WeightError

TOKENS = {"ids": ("batch", "length"), "attention_mask": ("batch", "length")}


class Decoder(nn.Module):
    """Layers of causal attention over what a mask leaves, with a tied head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x, places = self.embed(ids), torch.arange(ids.shape[1])
        allowed = attention_mask[:, None, None, :].bool() & (places[:, None] >= places)
        for layer, out in zip(self.layers, self.out, strict=True):
            q, k, v = layer(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            y = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
            x = x + out(y.transpose(1, 2).flatten(2)).relu()
        return {"hidden": x, "logits": self.head(x)}


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, max(1, length // 2) :] = 0
    return torch.randint(0, 40, (batch, length)), mask


CALLS = ((4, 8), (3, 6), (7, 9), (1, 3), (2, 8), (1, 1))


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.mark.parametrize("lowered", [False, True], ids=["", "lowered"])
@pytest.mark.parametrize(
    "how",
    [{"devices": 2}, {"mesh": {"tensor": 2}}, {"mesh": {"pipeline": 2, "tensor": 2}}],
    ids=["pipeline", "tensor", "both"],
)
def test_calls_of_many_sizes(how: dict[str, Any], lowered: bool) -> None:
    net = model()
    programs = sw.capture(net, tokens(4, 8), dynamic=TOKENS)
    bundle = sw.build(programs, sw.plan(programs, **how))
    with sw.Runner(sw.lower(bundle) if lowered else bundle, in_process=True) as runner:
        for sizes in CALLS:
            call = tokens(*sizes)
            torch.testing.assert_close(runner(*call), net(*call))
    assert len([*bundle.sizes()]) == 5


@pytest.mark.workers
def test_on_processes_and_from_several_threads() -> None:
    net = model()
    programs = sw.capture(net, tokens(4, 8), dynamic=TOKENS)
    bundle = sw.build(programs, sw.plan(programs, devices=2))
    calls = [tokens(*sizes) for sizes in CALLS * 3]
    with sw.Runner(bundle) as runner:
        for call, found in zip(calls, runner.map(calls), strict=True):
            torch.testing.assert_close(found, net(*call))
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda call: runner(*call), calls))
    for call, found in zip(calls, results, strict=True):
        torch.testing.assert_close(found, net(*call))


class Counter(nn.Module):
    """A buffer that each call changes, whatever its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * self.calls


@pytest.mark.workers
@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "processes"])
def test_a_buffer_is_one_for_all_sizes(in_process: bool) -> None:
    torch.manual_seed(0)
    net = Counter().eval()
    programs = sw.capture(net, (torch.randn(3, 8),), dynamic={"x": {0: "batch"}})
    assert programs.shapes.sizes["batch"].padding == "rows"
    bundle = sw.build(programs, sw.plan(programs, devices=2))
    inputs = [torch.randn(rows, 8) for rows in (3, 6, 1, 4, 3, 12)]
    with sw.Runner(bundle, in_process=in_process) as runner:
        found = list(runner.map(inputs))
    for x, output in zip(inputs, found, strict=True):
        torch.testing.assert_close(output, net(x))


def test_state_that_the_first_leaves_alone() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > 4:
                self.scale.mul_(2)
            return x.cumsum(1) * self.scale

    net = Sometimes().eval()
    programs = sw.capture(net, (torch.randn(3, 2, 8),), dynamic={"x": {1: "length"}})
    bundle = sw.build(programs, sw.plan(programs, devices=1))
    with (
        sw.Runner(bundle, in_process=True) as runner,
        pytest.raises(RunError, match=r"changes 'scale' for these sizes, which it leaves"),
    ):
        runner(torch.randn(3, 8, 8))


def test_a_call_whose_sizes_do_not_agree() -> None:
    programs = sw.capture(model(), tokens(4, 8), dynamic=TOKENS)
    bundle = sw.build(programs, sw.plan(programs, devices=1))
    with sw.Runner(bundle, in_process=True) as runner:
        with pytest.raises(InputError, match="'length' is 8 in one input and 7"):
            runner(tokens(4, 8)[0], tokens(4, 7)[1])
        with pytest.raises(InputError, match=r"input 'ids' is torch.float32"):
            runner(tokens(4, 8)[0].float(), tokens(4, 8)[1])


def test_verify_takes_a_bundle_or_its_folder(tmp_path: Path) -> None:
    net = model()
    programs = sw.capture(net, tokens(4, 8), dynamic=TOKENS)
    bundle = sw.build(programs, sw.plan(programs, devices=2))
    sw.verify(bundle, net, tokens(3, 6), tolerance=1e-5)
    bundle.save(tmp_path / "net")
    sw.verify(tmp_path / "net", net, tokens(3, 6), tolerance=1e-5)
    net.head.weight.data.mul_(2)
    with pytest.raises(sw.VerifyError, match="the file's weights are not the model's"):
        sw.verify(tmp_path / "net", net, tokens(3, 6), tolerance=1e-5)


def test_a_bundle_is_saved_while_a_runner_adds_pipelines(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    programs = sw.capture(model, (torch.randn(4, 8),), dynamic={"input": {0: "batch"}})
    bundle = sw.build(programs, sw.plan(programs, devices=2))
    calls = [torch.randn(rows, 8) for rows in (4, 1, 5, 9, 17, 33)]
    expected = [model(x) for x in calls]
    with ThreadPoolExecutor() as pool, sw.Runner(bundle, in_process=True) as runner:
        found = pool.submit(lambda: [runner(x) for x in calls])
        while not found.done():
            bundle.save(tmp_path / "bundle")
    torch.testing.assert_close(found.result(), expected)
    sw.Bundle.load(tmp_path / "bundle").check()


class Shifted(nn.Module):
    """Adds a constant that each size has of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        return self.linear(x) + torch.tensor([[self.scale * rows * row] for row in range(rows)])


@pytest.mark.parametrize("in_process", [True, False])
def test_a_folder_that_is_replaced_under_its_runner(tmp_path: Path, in_process: bool) -> None:
    """What was read before still runs; what would be read of the other model does not."""
    first, second = Shifted(1.0).eval(), Shifted(5.0).eval()
    bundles = []
    for model in (first, second):
        programs = sw.capture(model, (torch.randn(4, 8),), dynamic={"x": {0: "batch"}})
        bundles.append(sw.build(programs, sw.plan(programs, devices=1)))
        bundles[-1].at(batch=3)
    bundles[0].save(tmp_path / "bundle")
    x = torch.randn(4, 8)
    with sw.Runner(tmp_path / "bundle", in_process=in_process) as runner:
        bundles[1].save(tmp_path / "bundle")
        for _ in range(2):
            torch.testing.assert_close(runner(x), first(x))
            with pytest.raises(WeightError, match="was replaced after the bundle was loaded"):
                runner(x[:3])
    torch.testing.assert_close(sw.run(tmp_path / "bundle", x[:3], in_process=True), second(x[:3]))
