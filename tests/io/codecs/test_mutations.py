"""Every tensor of a file changed in every way: a codec says what is wrong, or gives parts that fit their spec."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pennyweight.io.codecs import CODECS, Codec
from tests.io.codecs import test_awq, test_bitsandbytes, test_hqq
from tests.io.codecs.kept import Tensors, changed, entries_of, fits

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def like(t: Tensor, content: Tensor) -> Tensor:
    """Bytes as a tensor of t's dtype and shape."""
    return content.view(t.dtype).reshape(t.shape)


CHANGES: dict[str, Callable[[Tensor], Tensor] | None] = {
    "gone": None,
    "scalar": lambda t: t.flatten()[:1].reshape(()),
    "flat": lambda t: t.flatten(),
    "nothing": lambda t: t.flatten()[:0],
    "no rows": lambda t: t[:0] if t.ndim else t,
    "a row less": lambda t: t[1:] if t.ndim else t.repeat(2),
    "a column less": lambda t: t[..., 1:] if t.ndim else t,
    "twice": lambda t: torch.cat([t, t]) if t.ndim else t.repeat(2),
    "transposed": lambda t: t.T.contiguous() if t.ndim == 2 else t.unsqueeze(0),
    "deeper": lambda t: t.unsqueeze(0).unsqueeze(0),
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "all bits": lambda t: like(t, torch.full((t.nbytes,), 255, dtype=torch.uint8)),
    "noise": lambda t: like(t, torch.randint(256, (t.nbytes,), dtype=torch.uint8)),
    **{f"as {dtype}": lambda t, dtype=dtype: t.to(dtype) for dtype in DTYPES},
}  # fmt: skip


def samples() -> dict[str, tuple[str, Tensors, dict[str, Any]]]:
    """Files of every kind: codec, tensors, config."""
    bnb, hqq = test_bitsandbytes, test_hqq
    out: dict[str, tuple[str, Tensors, dict[str, Any]]] = {}
    for kind, nested in (("nf4", False), ("fp4", True)):
        tensors, _ = bnb.quantized(kind, (8, 96), 64, torch.float16, nested)
        out[f"{kind}{' nested' * nested}"] = "bitsandbytes", tensors, bnb.config(kind)
    out["int8"] = "bitsandbytes", bnb.int8((4, 16), torch.float16)[0], bnb.INT8
    for nbits, axis in ((4, 1), (3, 0)):
        out[f"hqq {nbits}"] = "hqq", hqq.layer((8, 16), nbits, 8, axis)[0], hqq.CONFIG
    out["awq"] = "awq", test_awq.layer(16, 32, 16), test_awq.config(16)
    return out


SAMPLES = ("nf4", "fp4 nested", "int8", "hqq 4", "hqq 3", "awq")


@pytest.mark.parametrize("sample", SAMPLES)
def test_each_change_of_each_tensor(sample: str) -> None:
    assert tuple(samples()) == SAMPLES
    name, tensors, config = samples()[sample]
    codec = next(c for c in CODECS if c.name == name)
    outcomes = {True: 0, False: 0}
    for tensor in tensors:
        for change in CHANGES.values():
            outcomes[reads(codec, changed(tensors, tensor, change), config)] += 1
    assert reads(codec, tensors, config)
    assert min(outcomes.values()) > 5  # both happen


def reads(codec: Codec, tensors: Tensors, config: dict[str, Any]) -> bool:
    """Whether it is read; ValueError is the only other way to end."""
    try:
        found = codec.find(entries_of(tensors), config, tensors.__getitem__)
        for f in found.values():
            assert set(f.stored) <= tensors.keys()
            fits(f.parts(tensors.__getitem__), f.meta.spec, f.meta.stored_shape)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("sample", SAMPLES)
def test_settings_of_any_type(sample: str) -> None:
    name, tensors, config = samples()[sample]
    codec = next(c for c in CODECS if c.name == name)
    keys = (
        *config,
        "load_in_4bit",
        "load_in_8bit",
        "quant_config",
        "weight_quant_params",
        "q_group_size",
        "w_bit",
        "backend",
    )
    for key in {*keys} - {"quant_method"}:
        for value in (
            None,
            True,
            False,
            0,
            -1,
            1,
            16,
            2**70,
            1.5,
            "",
            "gemm",
            "nf4",
            [],
            [1],
            {},
            {"m": 1},
            {"a.m": 4},
        ):
            reads(codec, tensors, {**config, key: value})
            codec.claims({key: value}, entries_of(tensors))
    for value in (None, True, 3, "", "gptq", [], {"a": 1}):
        assert codec.claims({"quant_method": value}, entries_of(tensors)) == (value is None and name != "awq")
