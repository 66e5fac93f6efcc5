"""What a text leaves out is what Python passes: calls with arguments at every default there is.

Each argument of each sample takes in turn the schema's default, those of the Python function that
is called, and, of a flag or a number that stands for a word, every value. What the call is then
written as is captured as it, in a module and outside of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwright.errors import ShardwrightError
from shardwright.ir import resolve
from shardwright.ir.operators import signature
from tests.codegenerate.recapture import Recaptured
from tests.codegenerate.spelling_samples import Sample
from tests.codegenerate.spelling_table import SAMPLES


def public_defaults(text: str) -> list[Any]:
    """The defaults of the Python function that a text calls, where Python knows them."""
    first, *names = text.partition("(")[0].split(".")
    found: Any = {"F": F, "torch": torch}.get(first)
    for name in names:
        found = getattr(found, name, None)
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.default for each in parameters if each.default is not each.empty]


def variants(sample: Sample) -> Iterator[Sample]:
    """The call with one argument after another at each default that it does not have."""
    parameters = signature(resolve(f"aten.{sample.op}")).parameters
    by_place = [each.name for each in parameters if not each.keyword_only]
    given = {each.name: each.default for each in parameters}
    given |= dict(zip(by_place, sample.args, strict=False)) | sample.kwargs
    public = public_defaults(sample.text)
    for each in parameters:
        if NOT_TRIED.get(sample.op) == each.name:
            continue
        value = given[each.name]
        others = [False, True] if isinstance(value, bool) else []
        others += range(3) if each.name in WORDS else []
        others += [] if each.required else [each.default]
        others += [default for default in public if type(default) is type(value)]
        for other in {repr(other): other for other in others if other != value}.values():
            now = given | {each.name: other}
            args = tuple(now.pop(name) for name in by_place)
            yield replace(sample, args=args, kwargs=now, text=f"{sample.text}, {each.name}={other}")


WORDS = ("reduction", "interpolation_mode", "padding_mode")
"""Numbers in schemas that are words in Python."""

NOT_TRIED = {
    "batch_norm.default": "training",  # writes to the statistics that it is given
    "hardtanh.default": "max_val",  # below min_val
    **dict.fromkeys(("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"), "batch_first"),
}
"""Arguments whose other values do not go with the rest of the sample."""


def is_allowed(sample: Sample) -> bool:
    """Whether torch takes the call, which is not written by the overload's own name."""
    try:
        sample.graph()
    except (ShardwrightError, RuntimeError, ValueError, IndexError, TypeError):
        return False
    return not sample.spelled().startswith("torch.ops.")


@cache
def allowed(training: bool) -> list[Sample]:
    """All variants of one mode that there are."""
    samples = [each for each in SAMPLES if each.captured and each.training == training]
    return [variant for each in samples for variant in variants(each) if is_allowed(variant)]


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")  # kl_div warns of a mean
@pytest.mark.parametrize("in_module", [True, False])
@pytest.mark.parametrize("training", [False, True])
def test_captures_back(training: bool, in_module: bool) -> None:
    samples = allowed(training)
    recaptured = Recaptured(samples, training=training, in_module=in_module)
    for sample in samples:
        if sample.text.endswith(("train=False", "copy=False")):
            assert recaptured.is_nothing(sample), str(sample)
        else:
            recaptured.assert_is_captured_back(sample)
