"""`SynchronousPipeline`: generated partitions as one module, run in this process by GPipe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from shardwright.codegenerate.gpipe import GPipe, ties_kept, wiring_of
from shardwright.codegenerate.microbatches import (
    Batching,
    Reduction,
    captured_shapes,
    check_shapes,
)
from shardwright.errors import InputError


class SynchronousPipeline(nn.Module):
    """GPipe in one process: the stages of a generated file, run on microbatches.

    configuration
        The result of ``create_pipeline_configuration(model)`` in a generated file.
    microbatches
        Number of microbatches that a batch is split into, evenly, larger ones first. Stages of a
        generated file are specialized for the shapes of one microbatch.
    batch_dim
        The dimension of inputs and outputs that is split.
    batched
        The inputs that are split; others are passed whole. By default, those that are
        ``microbatches`` times as long along ``batch_dim`` as captured; if the stages do not say how
        they were captured, those as long as the first input.
    reduce
        How to combine each output without a batch dimension: ``mean`` (weighted by rows), ``sum``,
        or ``first`` if all microbatches give the same. An output as long as a microbatch is taken
        for its rows, so name it here if it is not. ``mean`` is right only if every row contributes
        the same number of terms. For a loss with ``ignore_index`` or class weights, return
        numerator and denominator, and reduce both by ``sum``.
    checkpoint
        Recompute activations in the backward instead of keeping them.

    Call it with the model's tensors by position, in the order of ``inputs``, or by name. It returns
    one tensor, or a tuple in the order of ``outputs``. Raises InputError if the configuration or
    the arguments do not match, WorkerError with stage and microbatch if a stage fails. GPipe: Huang
    et al., arXiv 1811.06965.
    """

    def __init__(
        self,
        configuration: Mapping[Any, Any],
        microbatches: int,
        *,
        batch_dim: int = 0,
        batched: Collection[str] | None = None,
        reduce: Mapping[str, Reduction] | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        wiring = wiring_of(configuration)
        self._batching = Batching(microbatches, batch_dim, batched, reduce)
        self._batching.check(wiring.inputs, wiring.outputs)
        self._stages = wiring.stages
        self.inputs, self.outputs = wiring.inputs, wiring.outputs
        self.checkpoint = checkpoint
        wanted = [name for name in self.outputs if name not in self.inputs]
        self._gpipe = GPipe(wiring.stages, wanted)

    @property
    def microbatches(self) -> int:
        """In how many a batch is cut."""
        return self._batching.count

    @property
    def stages(self) -> tuple[nn.Module, ...]:
        """The modules of the stages, in order."""
        return tuple(stage.module for stage in self._stages)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """The model's outputs; see the class."""
        given = self._named(args, kwargs)
        check_shapes(self._stages, self._batching, given)
        batch = self._batching.cut(given, captured_shapes(self._stages))
        made = self._gpipe.run(batch.parts, recompute=self.checkpoint)
        found = [
            given[name]
            if name in given
            else self._batching.join(name, [part[name] for part in made], batch)
            for name in self.outputs
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def close(self) -> None:
        """Nothing: there are no threads or processes to end. For code that closes pipelines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def extra_repr(self) -> str:
        """What `repr` says of it."""
        return f"{len(self._stages)} stages, {self.microbatches} microbatches"

    # --- a call ----------------------------------------------------------------------------

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a call by name, in the model's order. Raises InputError."""
        given = dict(zip(self.inputs, args, strict=False)) | dict(kwargs)
        unknown = set(kwargs) - set(self.inputs[len(args) :])
        if len(args) > len(self.inputs) or unknown or len(given) < len(self.inputs):
            raise InputError(
                f"{len(args)} positional arguments and the names {sorted(kwargs)} were given; "
                f"the inputs are: {', '.join(self.inputs)}"
            )
        return {name: _as_tensor(name, given[name]) for name in self.inputs}

    # --- what torch asks of a module -------------------------------------------------------
    # The stages are no submodules by name, but each is one without a name: what they hold has
    # the model's names here, and in whatever this module is a part of.

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The stages; through them `train`, `eval`, `to` and `apply` find what they change."""
        for number, stage in enumerate(self.stages):
            yield f"stage{number}", stage

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules by the model's names, under which two stages may have one each."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            for stage in self.stages:
                yield from stage.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this path. Raises AttributeError, also where it is cut in two."""
        found = [stage for stage in self.stages if _has(stage.get_submodule, target)]
        if not target or not found:
            return super().get_submodule(target)
        if len(found) > 1:
            raise AttributeError(
                f"{target!r} lies in {len(found)} stages in part; ask one of pipeline.stages"
            )
        return found[0].get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of this path, in whatever stage. Raises AttributeError."""
        for stage in self.stages:
            if _has(stage.get_parameter, target):
                return stage.get_parameter(target)
        raise AttributeError(f"no stage has a parameter {target!r}")

    def get_buffer(self, target: str) -> Tensor:
        """The buffer of this path, in whatever stage. Raises AttributeError."""
        for stage in self.stages:
            if _has(stage.get_buffer, target):
                return stage.get_buffer(target)
        raise AttributeError(f"no stage has a buffer {target!r}")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for stage in self.stages:
            stage.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Let each stage load what is its own; what none knows is unexpected."""
        own = state_dict
        if prefix:  # torch hands the versions of modules on to a root alone
            under = (key for key in state_dict if key.startswith(prefix))
            own = {key.removeprefix(prefix): state_dict[key] for key in under}
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        unknown, missing = dict.fromkeys(own), dict[str, None]()
        with ties_kept(self.stages):
            for stage in self.stages:
                found, errors = _load_stage(stage, own, assign)
                error_msgs += errors
                missing |= dict.fromkeys(found.missing_keys)
                unknown = {key: None for key in found.unexpected_keys if key in unknown}
        missing_keys += [prefix + key for key in missing]
        unexpected_keys += [prefix + key for key in unknown]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        with ties_kept(self.stages):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _as_tensor(name: str, given: Any) -> Tensor:
    """A tensor that was given, or that of a number. Raises InputError."""
    if isinstance(given, bool | int | float):
        return torch.tensor(given)
    if not isinstance(given, Tensor):
        raise InputError(
            f"the input {name!r} is a {type(given).__name__}; give a tensor. Those of lists and "
            "dicts are inputs of their own, by the names that `inputs` lists"
        )
    return given


# --- states --------------------------------------------------------------------------------------


class _StateKeys(NamedTuple):
    """Of a state that was loaded: missing keys, and keys that nothing knows."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def _has(get: Callable[[str], object], target: str) -> bool:
    """Whether a module finds what it is asked for by a path."""
    try:
        get(target)
    except AttributeError:
        return False
    return True


def _load_stage(
    stage: nn.Module, state: Mapping[str, Any], assign: bool
) -> tuple[_StateKeys, list[str]]:
    """Load what is a stage's own; its missing and unexpected keys, and size errors."""
    seen: list[_StateKeys] = []
    errors: list[str] = []

    def see(_: nn.Module, keys: _StateKeys) -> None:
        # Before torch raises for sizes that do not fit, and then tells no keys.
        seen.append(_StateKeys(list(keys.missing_keys), list(keys.unexpected_keys)))

    handle = stage.register_load_state_dict_post_hook(see)
    try:
        stage.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        if not seen:
            raise
        errors = str(error).splitlines()[1:]
    finally:
        handle.remove()
    return seen[0], errors
