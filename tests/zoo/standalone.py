"""Runs generated files where there is no shardwright: ``python -I -W error standalone.py CASES``.

CASES is what `torch.save` wrote: for each file its path, the model's inputs and outputs by name, a
checkpoint of the model, and its buffers that are in no checkpoint. Each file's stages take the
checkpoint strictly, run, and have to give the outputs to the last bit and the checkpoint back.
This file is no test, and imports nothing but torch.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ABSENT = "shardwright"


class Absent:
    """A finder of modules by which shardwright cannot be found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Nothing, but for shardwright an ImportError."""
        if name.partition(".")[0] == ABSENT:
            raise ModuleNotFoundError(f"{name} is not to be had here", name=name)
        return None


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(configuration: dict[Any, Any], inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    held = dict(inputs)
    for number in range(len(configuration) - 2):
        part = configuration[number]
        found = part["model"](*(held[name] for name in part["inputs"]))
        results = found if isinstance(found, tuple) else (found,)
        held.update(zip(part["outputs"], results, strict=True))
    return {name: held[name] for name in configuration["model outputs"]}


def problems(case: dict[str, Any]) -> list[str]:
    """What is wrong with a file."""
    configuration = imported(Path(case["path"])).create_pipeline_configuration(debug=True)
    checkpoint, left, found = case["checkpoint"], dict(case["checkpoint"]), []
    for number in range(len(configuration) - 2):
        stage = configuration[number]["model"].eval()
        own = {name: checkpoint[name] for name in stage.state_dict() if name in checkpoint}
        stage.load_state_dict(own, strict=True)
        for name, buffer in stage.named_buffers():
            if name in case["buffers"]:
                buffer.copy_(case["buffers"][name])
        for name, tensor in stage.state_dict().items():
            if not torch.equal(tensor, checkpoint[name]):
                found.append(f"saves another {name}")
            left.pop(name, None)
    found += [f"no stage saves {name}" for name in left]
    outputs = run(configuration, case["inputs"])
    if outputs.keys() != case["outputs"].keys():
        found.append(f"gives {', '.join(outputs)}, expected {', '.join(case['outputs'])}")
    for name, expected in case["outputs"].items():
        if name in outputs and not torch.equal(outputs[name], expected):
            found.append(f"gives another {name}")
    return found


def main(cases: Path) -> None:
    sys.meta_path.insert(0, Absent())
    assert ABSENT not in sys.modules
    failed = 0
    for case in torch.load(cases, weights_only=True):
        try:
            found = problems(case)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        failed += bool(found)
        print(
            *(f"{Path(case['path']).name}: {text}" for text in found),
            sep="\n",
            end="\n"[: bool(found)],
        )
    assert ABSENT not in sys.modules
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
