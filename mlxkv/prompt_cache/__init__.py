"""mlx-lm's prompt caches as blocks and back: what a live sequence holds, cut, committed and restored.

The only room that knows mlx-lm's cache classes, and the only one that sees both a model and the store. Where blocks are
kept is asked of `cache`; who runs next, of `engine`.
"""
