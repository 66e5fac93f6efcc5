"""Mutants of pipeline files: small good files, and ways to spoil one, all told by a number.

`subjects` builds the files; `mutant` spoils one of them as its number says: by its structure, with
the graphs of its tasks taken apart (values swapped, dropped, doubled, of another type, of another
place), or by its bytes; or the parameter file beside it. The same number gives the same mutant.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.pipeline import Pipeline
from shardwright.pipeline.paramfiles import write_paramfile
from tests.pipeline.damage import spoil, spoil_bytes
from tests.pipeline.weights_mutants import SUFFIXES, mutated

FILES = ("stages", "split", "training", "lowered", "lowered training")
WEIGHTS = tuple(f"weights by {format}" for format in SUFFIXES)
SUBJECTS = (*FILES, *WEIGHTS)
BATCH, WIDTH = 4, 6


@dataclass(frozen=True)
class Mutant:
    """What was spoiled: which subject, what was done, the pipeline file, a parameter file."""

    subject: str
    what: tuple[str, ...]
    data: bytes
    weights: bytes | None = None

    def write(self, good: Path, folder: Path) -> Path:
        """Put the file in a folder, with the parameter files of the good one; its path."""
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name in parameter_files(good, self.subject):
            if self.weights is None:
                os.link(good / name, folder / name)
            else:
                (folder / name).write_bytes(self.weights)
        path = folder / f"{self.subject}.json"
        path.write_bytes(self.data)
        return path


def parameter_files(good: Path, subject: str) -> set[str]:
    """The names of the parameter files that a good file names."""
    tensors = json.loads((good / f"{subject}.json").read_bytes())["tensors"].values()
    return {info["value"]["path"] for info in tensors if info.get("value")}


class Model(nn.Module):
    """Layers of several kinds, two results of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.nn.functional.gelu(self.norm(self.first(x)))
        h = torch.softmax(self.second(h), -1) + h
        return {"whole": self.last(h), "rows": h.sum(-1)}


def inputs(step: int = 0) -> Tensor:
    """What the files are run on."""
    return torch.arange(BATCH * WIDTH).reshape(BATCH, WIDTH).sin() + step


def subjects(folder: Path) -> None:
    """Write the good files, each with its weights."""
    torch.manual_seed(0)
    model = Model().eval()
    graph = sw.capture(model, (inputs(),))
    stages = sw.build(graph, sw.plan(graph, devices=2))
    stages.save(folder / "stages.json")
    sw.build(graph, sw.plan(graph, mesh={"tensor": 2})).save(folder / "split.json")
    for format in SUFFIXES:
        _with_weights(folder, format, model.state_dict())
    sw.lower(stages).save(folder / "lowered.json")
    step = sw.compile_ir(_step(), inputs()[: BATCH // 2])
    plan = sw.plan(step, mesh={"pipeline": 2}, microbatches=2)
    training = sw.build(step, plan)
    training.save(folder / "training.json")
    sw.lower(training).save(folder / "lowered training.json")


def _with_weights(folder: Path, format: str, weights: dict[str, Tensor]) -> None:
    """The stages, with weights in a file of this format."""
    file = f"weights{SUFFIXES[format]}"
    write_paramfile(folder / file, weights, format)  # type: ignore[arg-type]
    document = json.loads((folder / "stages.json").read_bytes())
    for info in document["tensors"].values():
        if info.get("value"):
            info["value"] |= {"path": file, "format": format}
    (folder / f"weights by {format}.json").write_text(json.dumps(document))


def _step() -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))
    # An eps that outweighs rounding: a gradient that is zero but for it stays without effect.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# --- spoiling --------------------------------------------------------------------------------


def mutant(folder: Path, seed: int) -> Mutant:
    """The mutant of this number."""
    draw = random.Random(seed)
    subject = draw.choice(SUBJECTS)
    data = (folder / f"{subject}.json").read_bytes()
    if subject in WEIGHTS:
        (name,) = parameter_files(folder, subject)
        format = subject.removeprefix("weights by ")
        done, weights = mutated(format, (folder / name).read_bytes(), draw)
        return Mutant(subject, (done,), data, weights)
    if draw.random() < 0.15:
        done, spoiled = spoil_bytes(data, draw)
        return Mutant(subject, (done,), spoiled)
    tree = opened(json.loads(data))
    what = tuple(spoil(tree, draw) for _ in range(draw.choice((1, 1, 1, 2))))
    return Mutant(subject, what, json.dumps(closed(tree)).encode())


def opened(document: dict[str, Any]) -> dict[str, Any]:
    """The document, the texts of its graphs taken apart in their place."""
    for holder, key in _texts(document):
        holder[key] = json.loads(holder[key])
    return document


def closed(tree: Any) -> Any:
    """The document again, of whatever became of it."""
    for holder, key in _texts(tree):
        if not isinstance(holder[key], str):
            holder[key] = json.dumps(holder[key])
    return tree


def _texts(document: Any) -> Iterator[tuple[dict[str, Any], str]]:
    if not isinstance(document, dict):
        return
    blobs, tasks = document.get("blobs"), document.get("supertasks")
    if isinstance(blobs, dict):
        yield from ((blobs, key) for key in blobs)
    if isinstance(tasks, dict):
        for task in tasks.values():
            if isinstance(task, dict) and task.get("data") is not None:
                yield task, "data"


# --- running ---------------------------------------------------------------------------------


def run(file: Path, *, in_process: bool = True) -> list[Tensor]:
    """What the product makes of a file: two calls, or two steps. Raises what it raises."""
    pipeline = Pipeline.load(file)
    if pipeline.training is None or pipeline.training.microbatches is None:
        with sw.Runner(pipeline, in_process=in_process) as runner:
            return [*_tensors([runner(inputs(k)) for k in range(2)])]
    with sw.Session(pipeline, in_process=in_process) as session:
        return [*_tensors([session.step(inputs(k), **_rates(pipeline)) for k in range(2)])]


def _rates(pipeline: Pipeline) -> dict[str, Tensor]:
    """The learning rate, where the file takes one."""
    names = [name for name in pipeline.metadata.tensors.inputs if name != "x"]
    return {name: torch.tensor(1e-2, dtype=torch.float64) for name in names if name == "lr"}


def _tensors(tree: Any) -> Iterator[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return (leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
