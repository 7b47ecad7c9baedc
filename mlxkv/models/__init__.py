"""Finding and loading a model: from a directory, a hub name or a GGUF file to weights, tokenizer and chat template.

Also what makes two caches incompatible (`fingerprint`). What a model takes is asked of `sizing`; nothing here knows of
blocks or tiers.
"""
