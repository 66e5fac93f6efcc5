"""A YAML text, read as keys and texts that know their lines.

Comes in: a text. Goes out: its tree, of which a reader asks what it expects, and gets a PlanError
that names file, line and key where something else stands. Scalars stay texts: what they mean the
reader says, not YAML (to which ``5e-6`` is a string, and ``no`` a falsehood).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import yaml

from shardwright.clusters.units import Quantity, parsed
from shardwright.errors import PlanError

MOST_BYTES = 10**18
"""More than any device has."""
MOST_DIGITS = 20
"""Of a number of things."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What stands at one place; ``key`` is the way to it (``links.inside``)."""

    node: yaml.Node
    key: str
    file: str

    def error(self, message: str) -> PlanError:
        """An error that says where this is."""
        line = self.node.start_mark.line + 1
        return PlanError(f"{self.file}, line {line}{self.key and f', {self.key}'}: {message}")

    @property
    def is_text(self) -> bool:
        """Whether this is neither a mapping nor a list."""
        return isinstance(self.node, yaml.ScalarNode)

    @property
    def is_list(self) -> bool:
        """Whether this is a list."""
        return isinstance(self.node, yaml.SequenceNode)

    def text(self) -> str:
        """The text that stands here. Raises PlanError."""
        if not self.is_text:
            raise self.error(f"found {self._what}, expected a value")
        return str(self.node.value)

    def number(self, quantity: Quantity) -> float:
        """The number of a quantity that stands here, a whole one for bytes. Raises PlanError."""
        try:
            exact = parsed(self.text(), quantity)
        except ValueError as error:
            raise self.error(str(error)) from None
        if quantity != "bytes":
            return float(exact)
        if abs(exact) > MOST_BYTES or exact != exact.to_integral_value():
            raise self.error(
                f"found {self.text()!r}, expected whole bytes, {MOST_BYTES:.0e} at most"
            )
        return int(exact)

    def count(self) -> int:
        """The whole number from 1 up that stands here. Raises PlanError."""
        text = self.text()
        if not (text.isascii() and text.isdigit() and len(text) < MOST_DIGITS and int(text)):
            raise self.error(f"found {text[:80]!r}, expected a number from 1 up")
        return int(text)

    def items(self) -> list[Branch]:
        """The items of the list that stands here. Raises PlanError."""
        if not self.is_list:
            raise self.error(f"found {self._what}, expected a list")
        return [
            Branch(node, f"{self.key}[{i}]", self.file) for i, node in enumerate(self.node.value)
        ]

    def fields(self, known: Collection[str]) -> dict[str, Branch]:
        """What stands here under each key, all of them known. Raises PlanError."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"found {self._what}, expected {', '.join(known)}")
        found: dict[str, Branch] = {}
        for key_node, node in self.node.value:
            key = str(key_node.value)
            branch = Branch(node, f"{self.key}.{key}" if self.key else key, self.file)
            if key not in known:
                raise branch.error(f"unknown key; known here are {', '.join(known)}")
            if key in found:
                raise branch.error("the key stands here twice; keep one")
            found[key] = branch
        return found

    @property
    def _what(self) -> str:
        kinds = {yaml.MappingNode: "keys with values", yaml.SequenceNode: "a list"}
        return kinds.get(type(self.node)) or repr(self.node.value)


def read_tree(text: str, file: str) -> Branch:
    """The tree of a text. Raises PlanError where it is no YAML, or empty."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else file
        raise PlanError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from None
    if node is None:
        raise PlanError(f"{file} is empty")
    return Branch(node, "", file)
