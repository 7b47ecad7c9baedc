"""A tiny model as mlx-lm finds one: a directory with config, weights and a tokenizer of one token a character."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny import Config, build_tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}> "
CHARACTERS = [chr(code) for code in (10, *range(32, 127))]


def save_model(directory: Path, config: Config, *, seed: int = 0, bits: int | None = None) -> Path:
    """Write a tiny random model; `bits` quantises it in groups of 32."""
    directory.mkdir(parents=True)
    module, config = build_tiny(config, seed), dict(config)
    if bits is not None:
        nn.quantize(module, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    mx.save_safetensors(
        str(directory / "model.safetensors"), dict(tree_flatten(module.parameters())), {"format": "mlx"}
    )
    (directory / "config.json").write_text(json.dumps(config))
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path, characters: list[str] = CHARACTERS) -> None:
    """Id i + 2 is the i-th character; 0 is unknown, 1 ends a reply."""
    vocabulary = {"<unk>": 0, END: 1} | {character: i + 2 for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


def save_adapter(directory: Path, config: Config, *, seed: int = 0, scale: float = 20.0) -> Path:
    """Write a LoRA adapter of random matrices over all layers, in mlx-lm's format."""
    directory.mkdir()
    settings = {"rank": 4, "scale": scale, "dropout": 0.0}
    module = build_tiny(config)
    linear_to_lora_layers(module, config["num_hidden_layers"], settings)
    found = [(name, array) for name, array in tree_flatten(module.parameters()) if "lora_" in name]
    keys = mx.random.split(mx.random.key(seed), len(found))
    drawn = {
        name: mx.random.normal(array.shape, scale=0.1, key=key) for (name, array), key in zip(found, keys, strict=True)
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), drawn)
    whole = {"fine_tune_type": "lora", "num_layers": config["num_hidden_layers"], "lora_parameters": settings}
    (directory / "adapter_config.json").write_text(json.dumps(whole))
    return directory
