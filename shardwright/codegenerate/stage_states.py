"""What stages hold, by the model's names: found by a path, and loaded from a state.

Comes in: a stage, and a path or a state of the whole model. Goes out: whether the path is there;
the stage with what is its own of the state, and the keys that lack or are too many for it. What
always holds: keys are told also where sizes do not fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from shardwright.torch_internals import set_versions, versions_in


class Keys(NamedTuple):
    """Of a state that was loaded: keys that lack, and keys that nothing knows."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def has(get: Callable[[str], object], target: str) -> bool:
    """Whether a module finds what it is asked for by a path."""
    try:
        get(target)
    except AttributeError:
        return False
    return True


def beneath(state: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """The entries of a state under a prefix, with the versions of the modules that wrote them.

    torch hands versions on to a root alone; within a larger module there are none to find.
    """
    found = OrderedDict(
        (key.removeprefix(prefix), value) for key, value in state.items() if key.startswith(prefix)
    )
    written: Mapping[str, Any] | None = versions_in(state)
    if written is not None:
        versions = {
            f"{path}.".removeprefix(prefix).removesuffix("."): dict(said)
            for path, said in written.items()
            if f"{path}.".startswith(prefix)
        }
        set_versions(found, versions)
    return found


def load_stage(stage: nn.Module, state: Mapping[str, Any], assign: bool) -> tuple[Keys, list[str]]:
    """Load what is a stage's own; which keys lack or are too many, and what does not fit."""
    seen: list[Keys] = []
    errors: list[str] = []

    def see(_: nn.Module, keys: Keys) -> None:
        # Before torch raises for sizes that do not fit, and then tells no keys.
        seen.append(Keys(list(keys.missing_keys), list(keys.unexpected_keys)))

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
