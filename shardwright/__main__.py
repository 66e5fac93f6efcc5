"""``python -m shardwright`` and the console script: the command line."""

from shardwright.cli.app import app


def main() -> None:
    """Run the command that the process's arguments name."""
    app()


if __name__ == "__main__":
    main()
