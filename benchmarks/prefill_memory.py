"""Peak memory of a real prefill on this machine's CPU against what `mlxkv budget --chip CPU` predicts.

    python benchmarks/prefill_memory.py                     SmolLM2-135M, float32, 512, 2,048 and 4,096 tokens
    python benchmarks/prefill_memory.py --tokens 512 --json

The model is built from the catalog's config with random weights: memory depends on shapes only. mlx-lm's own
`generate_step` prefills it, in a process of its own for each length, and `mx.get_peak_memory()` is read afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import mlxkv  # noqa: F401 - before MLX: it loads a fast BLAS


@dataclass(frozen=True)
class Comparison:
    """One length: predicted and measured peak."""

    model: str
    layers: int
    tokens: int
    step_tokens: int
    predicted_bytes: int
    peak_bytes: int
    error: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--step", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="cut the model to its first layers, to save time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(prefill(load_config(arguments.model, arguments.layers), arguments.tokens[0], arguments.step)))
        return
    rows = [compare(arguments.model, arguments.layers, tokens, arguments.step) for tokens in arguments.tokens]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'tokens':>7} {'predicted MB':>13} {'measured MB':>12} {'error':>7} {'seconds':>8}")
    for row in rows:
        predicted, measured = row.predicted_bytes / 1e6, row.peak_bytes / 1e6
        print(f"{row.tokens:>7,} {predicted:>13,.1f} {measured:>12,.1f} {row.error:>7.1%} {row.seconds:>8.1f}")


def compare(name: str, layers: int | None, tokens: int, step: int) -> Comparison:
    """Predict here, measure in a new process."""
    config = load_config(name, layers)
    predicted = predict(config, tokens, step)
    command = [sys.executable, __file__, "--here", "--model", name, "--tokens", str(tokens), "--step", str(step)]
    command += [] if layers is None else ["--layers", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    peak = measured["peak_bytes"]
    error = predicted / peak - 1
    return Comparison(name, config["num_hidden_layers"], tokens, step, predicted, peak, error, measured["seconds"])


def load_config(name: str, layers: int | None) -> dict[str, Any]:
    from mlxkv.sizing import catalog

    config = dict(catalog.find(name).config)
    return config if layers is None else config | {"num_hidden_layers": layers}


def predict(config: dict[str, Any], tokens: int, step: int) -> int:
    from mlxkv.budget import Deployment, find_machine, find_source, trace_model
    from mlxkv.sizing.weights import WeightSpec

    model = trace_model(find_source(config), weights=WeightSpec(32))
    deployment = Deployment(model, find_machine(chip="CPU"), prefill_step_tokens=step)
    return deployment.memory(tokens).total_bytes


def prefill(config: dict[str, Any], tokens: int, step: int) -> dict[str, float]:
    """Prefill `tokens` tokens and take one more, as `mlx_lm.generate` does; the peak since the weights were there."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import _get_classes

    mx.set_default_device(mx.cpu)
    model_class, arguments_class = _get_classes(config)
    model = model_class(arguments_class.from_dict(config))
    model.eval()
    mx.eval(model.parameters())
    mx.clear_cache()
    mx.reset_peak_memory()
    prompt = mx.arange(tokens) % 1000
    started = time.perf_counter()
    for _ in generate_step(prompt, model, max_tokens=1, prefill_step_size=step):
        pass
    return {"peak_bytes": mx.get_peak_memory(), "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()
