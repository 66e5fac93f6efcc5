"""`SynchronousPipeline` over stages that `codegen` wrote."""

from pathlib import Path

import pytest
import torch

from benchmarks.models import gpt
from shardwright.codegenerate import codegen
from shardwright.codegenerate.synchronous import SynchronousPipeline
from shardwright.errors import InputError
from shardwright.planner import plan
from shardwright.tracing import capture
from tests.codegenerate.staged import Configuration, assert_close, gradients
from tests.codegenerate.written import imported


def configuration_of(model: torch.nn.Module, ids: torch.Tensor, path: Path) -> Configuration:
    graph = capture(model, (ids,))
    codegen(plan(graph, devices=2), path, graph=graph)
    return imported(path).create_pipeline_configuration(model, debug=True)


def test_generated_stages_train_the_model(tmp_path: Path) -> None:
    model, (ids,) = gpt(2, batch=6, length=8, width=16)
    model.double()
    sum(model(part).square().sum() for part in ids.split(2)).backward()
    wanted = gradients(model)
    with SynchronousPipeline(configuration_of(model, ids[:2], tmp_path / "s.py"), 3) as pipeline:
        assert pipeline.state_dict().keys() == model.state_dict().keys()
        pipeline(ids=ids).square().sum().backward()
        assert_close(gradients(model), wanted)
        with pytest.raises(InputError, match=r"captured with \[2, 8\].*; give 6 rows in 3 micro"):
            pipeline(ids[:5])
