"""Where something is computed for a caller: an error of the device becomes a sentence, and memory is let go."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from mlxkv.core.device import Advice, device_error

_SHORTER = (
    "compute it in shorter chunks (chunk_tokens= or mlx-lm's prefill_step_size= in Python, --prefill-chunk of"
    " `mlxkv serve`), or shorten the prompt"
)
IN_PYTHON: Advice = {
    "memory": "give the hot tier less (hot= in Python, --hot), or shorten the prompt",
    "array": _SHORTER,
    "count": "give the hot tier less (hot= in Python, --hot)",
    "time": _SHORTER,
}
"""What to change where no server runs: in the library, `mlxkv chat` and `mlxkv demo`."""
_SMALLER = "take a smaller model, or one of fewer bits"
LOADING: Advice = {"memory": _SMALLER, "array": _SMALLER, "count": _SMALLER, "time": "load it again"}


@contextmanager
def computing(advice: Advice = IN_PYTHON, *, failed: Callable[[], object] | None = None) -> Iterator[None]:
    """Run the body; what it held of the device's memory is free again when it raises what the device said.

    Args:
        failed: called after any error in the body, before memory is let go.

    Raises:
        DeviceError: in the place of what MLX raised for the device.
    """
    try:
        yield
    except Exception as error:
        if failed is not None:
            failed()
        failure = device_error(error, advice)
        if failure is None:
            raise
        let_go(error)
        raise failure from error


def let_go(error: BaseException) -> None:
    """Free what a failed computation held: the arrays in the frames of its traceback, then what MLX keeps of them."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    mx.clear_cache()
