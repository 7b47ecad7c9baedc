"""The bytes each token id stands for, so that text can be found in tokens without encoding it again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SPECIAL = b"\xff"
"""Stands on both sides of a special token: no text in UTF-8 has this byte."""

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def token_pieces(tokenizer: Any) -> list[bytes]:
    """The bytes of every token id of a tokenizer of transformers, wrapped by mlx-lm or not.

    Knows byte-level BPE and SentencePiece by the tokenizer's decoder; other tokens stand for themselves. A tokenizer
    without a `tokenizers` backend is asked for each id by itself.

    Cost: one walk over the vocabulary, 30 ms for 49,152 tokens.
    """
    if not tokenizer.is_fast:
        return [tokenizer.decode([token_id]).encode() for token_id in range(len(tokenizer))]
    added = tokenizer.added_tokens_decoder
    decoder = tokenizer.backend_tokenizer.decoder
    kind = b"" if decoder is None else bytes(decoder.__getstate__())
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    alphabet = byte_alphabet()
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in added:
            special = added[token_id].special
            pieces[token_id] = SPECIAL + token.encode() + SPECIAL if special else token.encode()
        elif b"ByteLevel" in kind:
            pieces[token_id] = _byte_level(token, alphabet)
        elif b"ByteFallback" in kind and _BYTE.fullmatch(token):
            pieces[token_id] = bytes([int(token[3:5], 16)])
        else:
            pieces[token_id] = token.replace("▁", " ").encode()
    return pieces


def _byte_level(token: str, alphabet: Mapping[int, int]) -> bytes:
    """The bytes of one token; with a character outside the alphabet it stands for itself, as in `tokenizers`."""
    try:
        return bytes([alphabet[ord(character)] for character in token])
    except KeyError:
        return token.encode()


def byte_alphabet() -> dict[int, int]:
    """Code point -> byte in GPT-2's alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}
