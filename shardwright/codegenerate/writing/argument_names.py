"""What the arguments of a generated constructor are called.

Comes in: for each argument the uses that it has in the class. Goes out: a name for each. What
always holds: names differ from one another and from those that the class has.

An argument is named after the parameter of a layer that it is given to, or else of an operator:
`in_features` of what one layer takes alone, `features` of what comes in and goes out, and
`hidden_features` of what one layer makes for another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from torch import nn

from shardwright.codegenerate.writing.constants import Use
from shardwright.codegenerate.writing.names import identifier
from shardwright.codegenerate.writing.parameters import SIZE, VALUE, WIDTH

Uses = Sequence[Use]

_WEAK = (VALUE, SIZE, WIDTH, "num_features", "num_channels", "groups", "index", "dim")
"""Words that others say more than."""
_WORDS = {"normalized_shape": WIDTH}
_INHERITED = frozenset(dir(nn.ModuleDict()))
"""What a module, or a dictionary of them, has already; ``training`` is one's own."""


def argument_names(uses: Sequence[Uses], taken: Collection[str]) -> list[str]:
    """A name for each argument, none of them one of ``taken``."""
    names: list[str] = []
    for own in uses:
        wanted = identifier(_wanted(own, uses))
        name, number = wanted, 2
        while name in _INHERITED or name in taken or name in names:
            name, number = f"{wanted}_{number}", number + 1
        names.append(name)
    return names


def _wanted(own: Uses, every: Sequence[Uses]) -> str:
    words = [_word(use, own, every) for use in own]
    constructing = [
        word for word, use in zip(words, own, strict=True) if use.constructs or use.tensor
    ]
    flows = [word for word in constructing if word.startswith(("in_", "out_"))]
    if len({word.partition("_")[0] for word in flows}) == 2:
        first, _, what = flows[0].partition("_")
        return what if first == "in" else f"hidden_{what}"
    strong = [word for word in (*constructing, *words) if word not in _WEAK]
    return (strong or constructing or words)[0]


def _word(use: Use, own: Uses, every: Sequence[Uses]) -> str:
    """The word for one use, without a number that told it from others elsewhere."""
    if use.tensor:
        return _size_word(use, own, every)
    bare = re.sub(r"_\d+$", "", use.name)
    return _WORDS.get(bare, bare)


def _size_word(use: Use, own: Uses, every: Sequence[Uses]) -> str:
    """A word for a size of a parameter: a matrix with a bias makes as many features as that has."""
    is_matrix = any(each.tensor == "weight" and each.rank == 2 for uses in every for each in uses)
    if not is_matrix or not any(each.tensor == "bias" for uses in every for each in uses):
        return use.name
    return "out_features" if any(each.tensor == "bias" for each in own) else "in_features"
