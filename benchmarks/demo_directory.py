"""Write the demo model as a directory that mlx-lm can serve too: float32 weights, config, tokenizer, chat template.

    python benchmarks/demo_directory.py DIRECTORY

540 MB; needed to compare servers on the same weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxkv.models.loader import DEMO, load


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    model = load(DEMO)
    weights = dict(tree_flatten(model.module.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {key: value for key, value in model.config.items() if key not in ("quantization", "quantization_config")}
    config |= {"torch_dtype": "float32", "eos_token_id": sorted(model.tokenizer.eos_token_ids)}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    model.tokenizer._tokenizer.save_pretrained(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
