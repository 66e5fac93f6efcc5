"""Files that were changed at one place or a few: refused in words, or run as what they say.

Good files come from the training steps (forward, backward, update) of a decoder and of a network of
images, and from a model of operators that take places. ``MUTANTS`` in the environment says how many
are tried; `mutation` tries any number, with AddressSanitizer.
"""

import json
import os

import pytest

from shardwright.compiler.executor import Executor
from shardwright.compiler.tasks import plan_task
from shardwright.kernels.files import decode
from shardwright.kernels.lowered import BY_ID
from tests.compiler.running import assert_close
from tests.kernels.legality.mutants import mutant
from tests.kernels.legality.outcome import feed_of, outcome
from tests.kernels.legality.tasks import texts

MUTANTS = int(os.environ.get("MUTANTS", "200"))
SLICE = 50


def test_the_files_hold_what_is_to_be_changed() -> None:
    kinds = {BY_ID[call["kind"]].name for text in texts() for call in json.loads(text)["calls"]}
    wanted = {
        *("generic", "view", "fill", "concat", "add", "chain", "dropout", "gemm", "reduce_sum"),
        *("layer_norm", "layer_norm_bwd", "attention", "attention_bwd", "embedding"),
        *("embedding_bwd", "cross_entropy", "cross_entropy_bwd", "mse", "mse_bwd", "conv"),
        *("batch_norm", "batch_norm_bwd", "adamw", "sgd", "step_inc"),
    }
    assert wanted <= kinds


@pytest.mark.parametrize("first", range(0, MUTANTS, SLICE))
def test_a_changed_file_is_refused_or_runs(first: int) -> None:
    for seed in range(first, min(first + SLICE, MUTANTS)):
        try:
            outcome(mutant(seed).text, seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_a_seed_is_one_mutant() -> None:
    assert mutant(7) == mutant(7)
    assert len({mutant(seed) for seed in range(20)}) == 20


@pytest.mark.parametrize("number", range(4))
def test_good_files_run_alike_on_both_roads(number: int) -> None:
    graph = decode(texts()[number * len(texts()) // 4])
    plan, feed = plan_task(graph), feed_of(graph)
    native, torchs = (Executor(plan, native=chosen).run(feed) for chosen in (True, False))
    for a, b in zip(native, torchs, strict=True):
        assert_close(a, b, 1e-4)
