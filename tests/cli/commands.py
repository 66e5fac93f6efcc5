"""Commands, run in this process."""

from click.testing import Result
from typer.testing import CliRunner

from shardwright.cli.app import app


def invoke(*arguments: object) -> Result:
    """What a command does, whether it succeeds or not."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def succeed(*arguments: object) -> str:
    """What a command prints that succeeds."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """What a command says that fails."""
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    return result.stderr
