"""`python -m mlxkv_cli` is `mlxkv`."""

import sys

from mlxkv_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
