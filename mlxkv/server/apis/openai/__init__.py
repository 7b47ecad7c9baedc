"""OpenAI's API: chat completions, completions of plain text, and the list of models."""
