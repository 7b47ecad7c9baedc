"""What a device says, as people posted it, becomes a sentence that says what happened and what to change."""

import pytest
from failing import FAILED, OUT_OF_MEMORY, TOO_LONG, TOO_SLOW, VICTIM
from hypothesis import given
from hypothesis import strategies as st

from mlxkv.core.device import device_error, is_device_error
from mlxkv.core.errors import BudgetError, DeviceError
from mlxkv.engine.advice import advice
from mlxkv.engine.chunks import LEAST_CHUNK_TOKENS
from mlxkv.engine.scheduler import Limits
from mlxkv.models.computing import IN_PYTHON, LOADING

IGNORED = (
    f"{FAILED}Ignored (for causing prior/excessive GPU errors)"
    " (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)
SAID = [
    (OUT_OF_MEMORY, "memory", "the GPU ran out of memory"),
    (f"{FAILED}Zu wenig Speicher (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).", "memory", "out of memory"),
    ("[malloc] Unable to allocate 68719476736 bytes.", "memory", "out of memory"),
    ("cudaMallocAsync(&data, size, stream) failed: out of memory", "memory", "out of memory"),
    (TOO_LONG, "array", "an array of 45.39 GiB was needed, and one may have 28.08 GiB"),
    ("[metal::malloc] Resource limit (499000) exceeded.", "count", "as many arrays as Metal allows"),
    (TOO_SLOW, "time", "took too long"),
    (f"{FAILED}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).", "time", "took too long"),
    (f"{FAILED}Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).", "time", "took too long"),
    (IGNORED, "refused", "earlier errors"),
    (VICTIM, "fault", "the GPU failed"),
]  # fmt: skip
ADVICE = {kind: f"change what is for {kind}" for kind in ("memory", "array", "count", "time")}


@pytest.mark.parametrize(("said", "kind", "what"), SAID)
def test_the_sentence_says_what_happened_what_the_device_said_and_what_to_change(said, kind, what):
    found = device_error(RuntimeError(said), ADVICE)
    assert isinstance(found, DeviceError)
    assert found.kind == kind
    happened, _, change = str(found).partition(f" ({said.rstrip('.')}); ")
    assert what in happened
    assert change == f"{ADVICE[kind]}." if kind in ADVICE else "start" in change
    assert (found.exit_code, found.http_status) == (1, 503)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[matmul] dtype must be inexact."),
        RuntimeError("dictionary changed size during iteration"),
        RuntimeError("[metal::Device] Unable to load kernel x"),
        ValueError(OUT_OF_MEMORY),
        BudgetError("out of memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_are_no_error_of_the_device(error):
    assert device_error(error, ADVICE) is None
    assert not is_device_error(error)


def test_no_memory_in_this_process_is_one_too():
    assert str(device_error(MemoryError(), IN_PYTHON)).startswith(
        "there was no memory left (MemoryError); give the hot"
    )


def test_what_would_only_fail_again_is_not_to_be_sent_again():
    may_pass = {kind: device_error(RuntimeError(said), ADVICE).may_pass for said, kind, _ in SAID}
    assert {kind for kind, may in may_pass.items() if not may} == {"array", "time", "refused"}


@given(
    sequences=st.integers(1, 4),
    memory=st.none() | st.integers(1, 2**40),
    hot=st.integers(0, 2**40),
    chunk=st.none() | st.integers(LEAST_CHUNK_TOKENS, 4096),
)
def test_a_server_names_settings_that_can_be_lowered(sequences, memory, hot, chunk):
    known = advice(Limits(sequences, 8, memory), hot_bytes=hot, chunk_tokens=chunk)
    assert set(known) == set(IN_PYTHON) == set(LOADING)
    said = " ".join(known.values())
    assert "--memory" in known["memory"]
    assert ("--hot" in said) == (hot > 0)
    assert ("--sequences" in known["memory"]) == (sequences > 1)
    assert ("--prefill-chunk" in said) == (chunk is not None and chunk > LEAST_CHUNK_TOKENS)
    assert known["time"] == known["array"]
    assert ("--sequences" in known["time"]) == (chunk is None and sequences > 1)
    assert all(text.endswith("send a shorter prompt") for text in known.values())
