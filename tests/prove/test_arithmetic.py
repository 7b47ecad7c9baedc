"""The device's products against numpy: right here, and noticed where they are wrong."""

import mlx.core as mx
import pytest

from mlxkv.prove.arithmetic import check_attention, check_products, check_quantised


def wrong(compute, change):
    return lambda *arguments, **settings: change(compute(*arguments, **settings))


@pytest.mark.parametrize("check", [check_products, check_quantised, check_attention])
def test_this_device_computes_right_in_every_dtype(check):
    found = check()
    assert found.verdict == "ok", found
    assert all(0 <= found.figures[f"{dtype}_error"] < 1 for dtype in ("float32", "float16", "bfloat16"))


@pytest.mark.parametrize(
    "change", [lambda x: x * 1.5, lambda x: x[::-1] + 1, lambda x: x * mx.nan], ids=["larger", "turned", "nan"]
)
def test_a_wrong_product_fails_in_every_dtype(monkeypatch, change):
    monkeypatch.setattr(mx, "matmul", wrong(mx.matmul, change))
    found = check_products()
    assert found.verdict == "fail"
    assert "float32, float16, bfloat16" in found.said
    assert found.advice


def test_one_wrong_number_of_a_product_is_enough(monkeypatch):
    monkeypatch.setattr(mx, "matmul", wrong(mx.matmul, lambda x: x.at[0, 0].add(mx.array(0.5, x.dtype))))
    assert check_products().verdict == "fail"


def test_float32_that_is_rounded_to_ten_bits_is_a_note(monkeypatch):
    def rounded(left, right):
        if left.dtype != mx.float32:
            return multiply(left, right)
        return multiply(left.astype(mx.float16).astype(mx.float32), right.astype(mx.float16).astype(mx.float32))

    multiply = mx.matmul
    monkeypatch.setattr(mx, "matmul", rounded)
    found = check_products()
    assert found.verdict == "note"
    assert "MLX_ENABLE_TF32" in found.advice


def test_a_wrong_quantised_product_fails(monkeypatch):
    monkeypatch.setattr(mx, "quantized_matmul", wrong(mx.quantized_matmul, lambda x: x + 3))
    assert check_quantised().verdict == "fail"


def test_attention_that_sees_a_token_too_many_fails(monkeypatch):
    attend = mx.fast.scaled_dot_product_attention

    def all_seeing(q, k, v, *, scale, mask):
        del mask
        return attend(q, k, v, scale=scale)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", all_seeing)
    assert check_attention().verdict == "fail"
