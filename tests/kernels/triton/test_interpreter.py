"""The weight-only kernels against float64, in Triton's interpreter: values without a GPU. See interpreter.py."""

import pytest

from .interpreter import interpret

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")


@pytest.mark.parametrize("which", ["different", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_the_cases_of_the_first_use(which: str) -> None:
    found = interpret("first_use", which)
    assert found["wrong"] == {}
    assert found["count"] >= 12
    assert set(found["locks"]) == {0}


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_each_format_and_scale(dtype: str) -> None:
    found = interpret("formats", dtype)
    assert found["wrong"] == {}
    assert found["count"] > 30


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_each_code(dtype: str) -> None:
    found = interpret("codes", dtype)
    assert found["wrong"] == {}
    assert found["count"] > 30


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_programs_that_share_a_tile(which: str) -> None:
    found = interpret("splits", which)
    assert found["wrong"] == {}
    assert found["sizes"] == [2, 4, 8]
    assert len(found["locks"]) > 0
    assert set(found["locks"]) == {0}


@pytest.mark.parametrize(
    "bucket", [8, *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (16, 32, 64, 128, 256))]
)
def test_every_tile(bucket: int) -> None:
    found = interpret("candidates", bucket)
    assert found["wrong"] == {}
    assert found["count"] >= 6


PARTS = 16


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_all_cases(part: int) -> None:
    found = interpret("whole", part, PARTS)
    assert found["wrong"] == {}
    assert found["count"] > 5


def test_a_broken_kernel_is_refused() -> None:
    found = interpret("broken")
    (text,) = found["warnings"]
    for words in ("triton_weight_only on Card", "int4, 1 row: relative error", "dequantized at each call", "doctor"):
        assert words in text
    assert "failed its self-test" in found["why"]
    assert found["trusted"] == "triton_weight_only"
    assert found["proven"] == ["dequantize", "dequantize"]
