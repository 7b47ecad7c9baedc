"""Layouts: which arrays share a tensor, and how many bytes that is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxkv.cache.layout import DTYPES, ArraySpec, Layout
from mlxkv.cache.names import BLOCK_TOKENS


def layers(count: int, heads: int, dim: int, dtype: str) -> tuple[ArraySpec, ...]:
    return tuple(ArraySpec(f"{i}.{side}", heads, dim, dtype) for i in range(count) for side in ("keys", "values"))


arrays = st.builds(
    ArraySpec, st.text(max_size=4), st.integers(0, 3), st.integers(0, 3), st.sampled_from(sorted(DTYPES))
)


def test_a_block_of_qwen2_5_0_5b_has_768_kib():
    assert Layout(layers(24, 2, 64, "bfloat16")).block_bytes == 786_432


def test_a_block_of_smollm2_135m_in_half_precision_has_1_474_560_bytes():
    layout = Layout(layers(30, 3, 64, "float16"))
    assert (layout.block_bytes, layout.bytes_per_token) == (1_474_560, 23_040)


def test_arrays_of_equal_shape_and_dtype_share_one_tensor_in_their_order():
    (tensor,) = Layout(layers(3, 2, 16, "float32")).tensors
    assert tensor.paths == ("0.keys", "0.values", "1.keys", "1.values", "2.keys", "2.values")
    assert tensor.shape() == (6, 2, BLOCK_TOKENS, 16)
    assert tensor.shape(5) == (6, 2, 5, 16)
    assert tensor.nbytes() == 6 * 2 * 64 * 16 * 4
    assert tensor.row_bytes == 64


@pytest.mark.parametrize(
    "other",
    [
        ArraySpec("1.keys", 3, 16, "float32"),
        ArraySpec("1.keys", 2, 8, "float32"),
        ArraySpec("1.keys", 2, 16, "float16"),
    ],
)
def test_other_heads_dim_or_dtype_is_another_tensor(other):
    mixed = Layout((ArraySpec("0.keys", 2, 16, "float32"), other, ArraySpec("2.keys", 2, 16, "float32")))
    assert [(t.name, t.paths) for t in mixed.tensors] == [("kv0", ("0.keys", "2.keys")), ("kv1", ("1.keys",))]


@given(st.lists(arrays, max_size=8))
def test_the_tensors_hold_every_array_that_has_bytes_once_and_no_more_bytes(specs):
    layout = Layout(tuple(specs))
    held = sorted(path for tensor in layout.tensors for path in tensor.paths)
    assert held == sorted(spec.path for spec in specs if spec.heads * spec.dim)
    by_hand = sum(spec.heads * spec.dim * DTYPES[spec.dtype][1] for spec in specs)
    assert layout.bytes_per_token == by_hand
    assert layout.block_bytes == 64 * by_hand == sum(tensor.nbytes() for tensor in layout.tensors)
    assert len({tensor.name for tensor in layout.tensors}) == len(layout.tensors)


@given(st.lists(arrays, max_size=4), st.lists(arrays, max_size=4))
def test_two_layouts_have_the_same_text_exactly_when_they_are_equal(a, b):
    one, other = Layout(tuple(a)), Layout(tuple(b))
    assert (one.to_json() == other.to_json()) == (one == other)
    assert one.to_json() == Layout(tuple(a)).to_json()


@given(st.lists(arrays, max_size=4))
def test_a_layout_is_read_back_from_its_text(specs):
    layout = Layout(tuple(specs))
    assert Layout.from_json(layout.to_json()) == layout
    assert json.loads(layout.to_json()) == {
        "arrays": [[s.path, s.heads, s.dim, s.dtype, s.window] for s in specs],
        "states": [],
    }


def test_every_dtype_has_the_bytes_its_safetensors_name_says():
    for name, (tag, size) in DTYPES.items():
        assert int(tag.lstrip("BFIU")) == 8 * size, name
