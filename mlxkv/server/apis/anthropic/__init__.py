"""Anthropic's API: messages, and how many tokens one would have."""
