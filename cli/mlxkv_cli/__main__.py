"""The entry point, `mlxkv` and `python -m mlxkv_cli`: Ctrl-C is silent while the rest is still being imported, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from mlxkv_cli.main import main as command  # Rich and Typer take 0.2 s, long enough to change one's mind
    except KeyboardInterrupt:
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
