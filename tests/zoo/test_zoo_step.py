"""Training steps of all models of the zoo: the graph's steps equal eager's, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.tracing.stepping import assert_same_steps

pytest.importorskip("transformers")

from tests.rounding import BITS
from tests.zoo.captures import SHALLOW
from zoo.models import BY_NAME

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore::Warning:transformers")]

GROUPED = {"llama", "mixtral", "qwen3", "gemma", "gemma3"}
"""Models whose attention is captured with a mask and repeated keys, and is causal with keys in
groups in eager: in the backward the kernel's products have other layouts."""


@pytest.mark.parametrize("name", BY_NAME)
def test_steps_equal_eager(name: str) -> None:
    def make() -> Callable[..., Any]:
        model = BY_NAME[name].make(dropout=False, layers=SHALLOW)[0].train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            outputs = pytree.tree_leaves(dict(model(**batch)))
            loss = sum(item.square().mean() for item in outputs if item.requires_grad)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return step

    torch.manual_seed(0)
    kwargs = BY_NAME[name].inputs()
    batches = [(kwargs,), (kwargs,)]
    # An update is near a gradient's sign: where one is small, its rounding counts for more.
    tolerance = 10 * BITS if name in GROUPED else 0.0
    graph = assert_same_steps(make, batches, tolerance=tolerance)
    assert [node.op for node in graph.nodes if "." not in node.op] == [
        "zero_grad",
        "Backward",
        "clip_grad_norm",
        "adamw_step",
    ]
