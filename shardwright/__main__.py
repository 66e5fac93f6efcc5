"""``python -m shardwright`` and the console script: the command line."""

import atexit
import gc

from shardwright.cli.app import app


def main() -> None:
    """Run the command that the process's arguments name."""
    # The interpreter's last collections would search all that torch has imported: half a second.
    atexit.register(gc.freeze)
    app()


if __name__ == "__main__":
    main()
