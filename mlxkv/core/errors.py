"""Every error mlxkv raises on purpose, each with its exit code and HTTP status.

    MlxkvError                  1   500
    ├── UsageError              2   400   the caller asked for something that cannot be
    │   └── ModelNotFoundError  2   404   no such model here
    ├── ModelError              2   400   the model's files or config cannot be used
    ├── BudgetError             1   503   it does not fit
    ├── DeviceError             1   503   the GPU failed while it computed
    ├── CacheRootError          1   500   the cache directory cannot be trusted or used
    ├── UnusableMlxError        1   500   MLX cannot run on this CPU
    └── DamagedBlockError       1   500   a block file is not what it claims; always handled as a miss

A message is one sentence that ends in what to do; the command line prints it as it is.
"""

from __future__ import annotations


class MlxkvError(Exception):
    """Base of the tree: `exit_code` for the command line, `http_status` for the server."""

    exit_code = 1
    http_status = 500


class UsageError(MlxkvError):
    """A wrong argument, option or request."""

    exit_code = 2
    http_status = 400


class ModelNotFoundError(UsageError):
    """No model of that name, path or hub id can be reached."""

    http_status = 404


class ModelError(MlxkvError):
    """A model's files or config are incomplete, damaged or of a kind mlxkv cannot run."""

    exit_code = 2
    http_status = 400


class BudgetError(MlxkvError):
    """Something needs more bytes than it may have."""

    http_status = 503


class DeviceError(MlxkvError):
    """What computes has failed; `kind` is how, `may_pass` whether the same request may go well a moment later."""

    http_status = 503

    def __init__(self, message: str, *, kind: str, may_pass: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.may_pass = may_pass


class CacheRootError(MlxkvError):
    """The cache directory is missing, unsafe or of another format."""


class UnusableMlxError(MlxkvError):
    """MLX's build dies on this CPU; raised where it is imported."""


class DamagedBlockError(MlxkvError):
    """A block file failed a check; `reason` is the check's name for the log."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"block file failed the {reason} check; it was set aside and will be computed again")
        self.reason = reason
