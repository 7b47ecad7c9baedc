"""A tiny model that can be talked to: a random llama, a tokenizer of ASCII characters, and a chat template."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import build_tiny, tiny_llama
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxkv.models.fingerprint import module_fields
from mlxkv.models.loader import LoadedModel

MARKS = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
END = MARKS.index("</s>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if '~' in message.content %}{{ raise_exception('tildes are not allowed') }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content + '</s>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """128 ids: six marks, then the ASCII characters from 6 on, one a token."""
    vocabulary = {token: i for i, token in enumerate([*MARKS, *map(chr, range(len(MARKS), 128))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(MARKS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def talking_model(seed: int = 0, *, context_tokens: int | None = 4096) -> LoadedModel:
    """`load` of the directory that `save_talking_model` writes, without the directory."""
    module, tokenizer = build_tiny(tiny_llama(), seed), TokenizerWrapper(plain_tokenizer())
    return LoadedModel("talking", module, tokenizer, tiny_llama(), module_fields(module, tokenizer), context_tokens)


def save_talking_model(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the model as mlx-lm keeps one; `changes` go into its config."""
    directory.mkdir(parents=True)
    config = tiny_llama() | changes
    weights = dict(tree_flatten(build_tiny(config, seed).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": END}))
    plain_tokenizer().save_pretrained(directory)
    return directory


class Script(nn.Module):
    """Says a list of different tokens, whatever came before the last of them: each token is followed by the next.

    It computes: its one layer's keys and values depend on the tokens, so a block of it is worth keeping.
    """

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        super().__init__()
        following = list(range(vocabulary))
        for token, after in pairwise(tokens):
            following[token] = after
        self.following = mx.array(following)
        self.first = tokens[0]
        self.layers = [None]

    def start_after(self, token: int) -> None:
        """Begin the list after `token`, the last one of a prompt."""
        self.following[token] = self.first

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        states = (inputs[:, None, :, None] * mx.arange(1, 5)).astype(mx.float32)
        cache[0].update_and_fetch(states, -states)
        return (mx.arange(self.following.size) == self.following[inputs][..., None]).astype(mx.float32)
