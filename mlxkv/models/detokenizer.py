"""The bytes of single tokens, and a streaming detokenizer that loses none of them."""

from __future__ import annotations

from typing import Any

from mlxkv.core.platform import keep_open_files_limit
from mlxkv.models.gguf import ByteDetokenizer, byte_level_pieces

with keep_open_files_limit():
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper


def keep_every_byte(tokenizer: TokenizerWrapper) -> TokenizerWrapper:
    """The same tokenizer; where mlx-lm would stream byte-level BPE it drops a leading space, and this does not."""
    if type(tokenizer._detokenizer) is BPEStreamingDetokenizer:
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        tokenizer._detokenizer = ByteDetokenizer(byte_level_pieces([token or "" for token in tokens]))
    return tokenizer


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What one token stands for; a part of a character has bytes that are no text alone."""
    detokenizer = tokenizer.detokenizer
    if isinstance(detokenizer, ByteDetokenizer):
        return detokenizer.piece(token)
    text: str = tokenizer.decode([token])
    return text.encode()
