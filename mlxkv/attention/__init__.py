"""Attention in MLX operations: written out, in parts, over blocks, and over a prefix that sequences share."""
