"""What version 0.1 wrote is read, and gives what it gave."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardwright as sw
from tests.fixtures.golden.write import FOLDER, MODELS, STEPS, STEPS_ON, language, picture, step_of


def folder_of(case: str) -> Path:
    return FOLDER / case.replace(" ", "_")


def near(dtype: torch.dtype) -> float:
    return 1e-11 if dtype == torch.float64 else 1e-5


@pytest.mark.parametrize("case", MODELS)
def test_a_pipeline_gives_what_it_gave(case: str) -> None:
    results = load_file(folder_of(case) / "results.safetensors")
    pipeline = sw.Pipeline.load(folder_of(case) / "model.pipeline.json")
    output = sw.run(pipeline, results["input"], in_process=True)
    close = near(results["output"].dtype)
    torch.testing.assert_close(output, results["output"], rtol=close, atol=close)


@pytest.mark.parametrize("case", MODELS)
def test_a_plan_builds_its_model(case: str) -> None:
    kind, dtype, _, _ = MODELS[case]
    results = load_file(folder_of(case) / "results.safetensors")
    model = (language(dtype) if kind == "language" else picture(dtype)).eval()
    graph = sw.capture(model, (results["input"],))
    pipeline = sw.build(graph, sw.Plan.load(folder_of(case) / "plan.json"))
    sw.verify(pipeline, model, (results["input"],), tolerance=near(dtype), in_process=True)


@pytest.mark.parametrize("case", STEPS_ON)
def test_a_training_pipeline_has_the_losses_that_it_had(case: str) -> None:
    results = load_file(folder_of(case) / "results.safetensors")
    path = folder_of(case) / "step.pipeline.json"
    with sw.Session(path, in_process=True) as session:
        losses = [session.step(batch, lr=1e-2) for batch in results["batches"]]
    torch.testing.assert_close(torch.stack(losses), results["losses"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"data": 2}], ids=str)
@pytest.mark.parametrize("case", STEPS_ON)
def test_a_checkpoint_is_resumed(case: str, mesh: dict[str, int], tmp_path: Path) -> None:
    kind, _ = STEPS_ON[case]
    if kind == "picture" and "data" in mesh:
        mesh = {"pipeline": 1}  # batch norm over half a batch is another step
    results = load_file(folder_of(case) / "results.safetensors")
    shutil.copytree(folder_of(case) / "kept", tmp_path / "kept")
    result = sw.train(
        step_of(kind),
        list(results["batches"]),
        epochs=1,
        mesh=mesh,
        checkpoint=tmp_path / "kept",
        resume=True,
        in_process=True,
        quiet=True,
    )
    expected = results["losses"][STEPS // 2 :].tolist()
    assert result.losses[-len(expected) :] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("case", STEPS_ON)
def test_a_plan_builds_its_step(case: str) -> None:
    kind, _ = STEPS_ON[case]
    results = load_file(folder_of(case) / "results.safetensors")
    plan = sw.Plan.load(folder_of(case) / "plan.json")
    result = sw.train(
        step_of(kind), list(results["batches"]), epochs=1, plan=plan, in_process=True, quiet=True
    )
    assert result.losses == pytest.approx(results["losses"].tolist(), rel=1e-10)
