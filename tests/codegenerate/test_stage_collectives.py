"""Collectives as text, and the text that a file needs for them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.codegenerate.splitting.collectives import (
    COLLECTIVES,
    is_collective,
    spell_collective,
)
from shardwright.codegenerate.splitting.text import definitions, pasted
from shardwright.errors import CodegenError
from shardwright.ir import Builder, IRNode

ATTRIBUTES = {
    "op": "max",
    "dim": 1,
    "sizes": [3, 2],
    "split_dim": 0,
    "split_sizes": [2, 2],
    "join_dim": 1,
    "join_sizes": [4],
}


def node_of(op: str) -> IRNode:
    builder = Builder()
    x = builder.input("x", (4, 5))
    attrs = {"axis": "tensor"} | {name: ATTRIBUTES[name] for name in COLLECTIVES.get(op, ())}
    builder.emit(op, [x], attrs, outputs=[builder.value("y", (4, 5))])
    return builder.graph.nodes[-1]


def test_each_is_a_call_of_a_function_that_is_there() -> None:
    for op, names in COLLECTIVES.items():
        node = node_of(op)
        assert is_collective(node)
        written = spell_collective(node, {node.inputs[0]: "a + b"})
        call = ast.parse(written, mode="eval").body
        assert isinstance(call, ast.Call)
        assert ast.unparse(call.args[0]) == "a + b"
        assert ast.unparse(call.args[1]) == "self.slots['tensor']"
        assert [keyword.arg for keyword in call.keywords] == list(names)
        parameters = function(op).args.args
        assert [parameter.arg for parameter in parameters] == ["x", "axis", *names]


def function(name: str) -> ast.FunctionDef:
    found = ast.parse(definitions()[name].text).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def test_text_of_a_gather() -> None:
    node = node_of("all_gather")
    written = spell_collective(node, {node.inputs[0]: "x"})
    assert written == 'all_gather(x, self.slots["tensor"], dim=1, sizes=(3, 2))'


def test_an_axis_may_have_any_name() -> None:
    node = node_of("all_reduce")
    node.attrs["axis"] = 'say "x"\n'
    call = ast.parse(spell_collective(node, {node.inputs[0]: "x"}), mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.args[1], ast.Subscript)
    assert ast.literal_eval(call.args[1].slice) == node.attrs["axis"]


def test_other_nodes_are_refused() -> None:
    with pytest.raises(CodegenError, match="Backward is no collective"):
        spell_collective(node_of("Backward"), {})


def test_only_what_is_used_is_pasted() -> None:
    text = pasted(["all_reduce"]).text
    assert "class Conjugate" in text
    assert "def summed" in text
    assert "def gathered" not in text
    assert "join_state_dicts" not in text
    assert "shardwright" not in text
    assert pasted([]) == ((), "")


@pytest.mark.parametrize("names", [[op] for op in COLLECTIVES] + [["join_state_dicts"], ["Slots"]])
def test_what_is_pasted_stands_by_itself(names: list[str], tmp_path: Path) -> None:
    found = pasted(names)
    imports = "\n".join(found.imports)
    path = tmp_path / "generated.py"
    path.write_text(f"from __future__ import annotations\n\n{imports}\n\n\n{found.text}\n")
    rules = ["--isolated", "--select", "F", "--line-length", "100", "--no-cache"]
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *rules, str(path)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    assert "shardwright" not in path.read_text()
