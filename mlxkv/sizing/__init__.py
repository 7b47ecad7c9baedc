"""What a model takes, from its config alone: exact bytes of weights and of KV cache, traced, nothing evaluated.

Only what can be said without a single weight may stand here; what fits a machine is asked of `budget`.
"""
