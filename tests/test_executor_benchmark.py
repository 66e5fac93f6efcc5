"""What the executor's benchmark writes and answers; nothing is measured here."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.executor import __main__ as benchmark
from benchmarks.executor import worker
from benchmarks.executor.report import Line, markdown, words_of
from benchmarks.executor.variants import ON_CUDA, reduced, variants_of
from benchmarks.executor.workloads import WORKLOADS

RESULTS = Path(__file__).parents[1] / "benchmarks/results/executor.md"
RIGHT = Line("eager", 0.02, 1.226e-3, 4.01, 0.0)
FLOOR = Line("floor", 0.01, 0.322e-3, 1.05, None)
OURS = Line("shardwright", 0.37, 0.310e-3, 1.0, 1e-7)


def run(monkeypatch: pytest.MonkeyPatch, lines: list[Line], *arguments: str) -> int:
    def rows(*_: object) -> Iterator[Line]:
        return iter(lines)

    monkeypatch.setattr(benchmark, "rows", rows)
    return benchmark.main(["--workloads", "mlp-small", *arguments])


def test_what_is_saved_is_the_results_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "found.md"
    assert run(monkeypatch, [RIGHT, FLOOR, OURS], "--save", str(path)) == 0
    found, kept = path.read_text().splitlines(), RESULTS.read_text().splitlines()
    assert found[0] == kept[0]
    assert found[2].startswith("Made by `python -m benchmarks.executor --workloads mlp-small")
    begin = found.index("## MLP 3x128, batch 64, train, 1 thread")
    assert found[begin : begin + 4] == kept[kept.index(found[begin]) :][:4]
    assert found[begin + 4 :] == [
        "| eager | 0.02 s | 1.226 ms | 4.01 | 0e+00 |",
        "| floor | 0.01 s | 0.322 ms | 1.05 |  |",
        "| shardwright | 0.37 s | 0.310 ms | 1.00 | 1e-07 |",
    ]


@pytest.mark.parametrize("off", [2e-3, math.nan, math.inf])
def test_a_wrong_result_is_said_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], off: float
) -> None:
    assert run(monkeypatch, [RIGHT, OURS._replace(off=off)]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_result_without_a_number_is_not_overlooked(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    torch.save([[torch.ones(2)], [torch.ones(2)]], first)
    torch.save([[torch.ones(2)], [torch.tensor([1.0, math.nan])]], other)
    assert math.isnan(benchmark.difference(other, first))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA devices refuses")
def test_without_a_gpu_cuda_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cuda"])
    assert "no CUDA device; leave out --device cuda" in capsys.readouterr().err


def test_on_a_gpu_there_is_no_fused_optimizer_of_a_forward() -> None:
    assert list(variants_of(WORKLOADS["mlp-small"], "cuda")) == list(ON_CUDA)
    assert set(ON_CUDA) - set(variants_of(WORKLOADS["gpt-1"], "cuda")) == {"eager, fused"}


@pytest.mark.parametrize("name", ["mlp-small", "resnet"])
def test_every_step_of_cuda_graphs_begins_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant itself, with a compiler that leaves the model as it is."""
    begun, modes = [], []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    monkeypatch.setattr(torch, "compile", lambda f, mode: modes.append(mode) or f)
    workload = WORKLOADS[name]
    step = reduced(workload, worker.placed(workload.make(), "cpu"))
    eager = variants_of(workload)["eager"](workload, workload.make())
    for _ in range(2):
        (found,), (expected,) = worker.tensors_of(step()), worker.tensors_of(eager())
        torch.testing.assert_close(found, expected)
    assert len(begun) == 2
    assert modes == ["reduce-overhead"]


def test_the_words_say_how_it_was_made() -> None:
    words = words_of(arguments=["--rounds", "3"], device="cpu", seconds=1900, rounds=3)
    assert "Made by `python -m benchmarks.executor --rounds 3` in 32 minutes on" in words
    assert max(map(len, markdown(words, {}).splitlines())) <= 120
