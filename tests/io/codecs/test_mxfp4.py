"""gpt-oss's MXFP4 experts against transformers' own unpacking."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from pennyweight.core.spec import INT4_GROUP, INT8_ROW, MXFP4, NVFP4, ActivationSpec, QuantSpec
from pennyweight.io.codecs.mxfp4 import EXPERTS_MXFP4, find
from pennyweight.io.manifest import Meta
from tests.io.codecs.kept import entries_of, same_bytes, tensor_of, written

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def experts(shape: tuple[int, int, int] = (3, 7, 2)) -> dict[str, Tensor]:
    return {
        "mlp.experts.gate_up_proj_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
        "mlp.experts.gate_up_proj_scales": torch.randint(60, 190, shape, dtype=torch.uint8),
        "mlp.experts.gate_up_proj_bias": torch.zeros(3, 7, dtype=torch.bfloat16),
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 7, 2), (1, 1, 1), (2, 64, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tensors = experts(shape)
    found = find(entries_of(tensors), CONFIG, tensors.__getitem__)
    assert list(found) == ["mlp.experts.gate_up_proj"]
    w = tensor_of(found["mlp.experts.gate_up_proj"], tensors)
    blocks, scales, _ = tensors.values()
    assert (w.dtype, w.spec, w.axes) == (torch.bfloat16, MXFP4, (0, 2, 1))
    want = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(w.dequantize(dtype), want)
    assert tuple(w.shape) == tuple(want.shape) == (shape[0], shape[2] * 32, shape[1])
    back, method = written(EXPERTS_MXFP4, {"mlp.experts.gate_up_proj": w})
    assert len(back) == 2
    assert all(same_bytes(back[key], tensors[key]) for key in back)
    Mxfp4Config(**{k: v for k, v in method.items() if k != "quant_method"})


@pytest.mark.parametrize(
    ("ending", "change", "why"),
    [
        ("blocks", None, "_blocks is missing"),
        ("scales", None, "_scales is missing"),
        ("blocks", lambda t: t.int(), r"int32 \[.*\], expected uint8"),
        ("scales", lambda t: t.float(), "_scales is missing"),
        ("blocks", lambda t: t[0], "expected .experts, rows, groups, 16."),
        ("blocks", lambda t: t[..., :8], "expected .experts, rows, groups, 16."),
        ("blocks", lambda t: t[:0], "expected .experts"),
        ("scales", lambda t: t[:, 1:], r"\[3, 6, 2\], expected .*\[3, 7, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(ending: str, change: Any, why: str) -> None:
    tensors = experts()
    name = f"mlp.experts.gate_up_proj_{ending}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=why):
        find(entries_of(tensors), CONFIG, tensors.__getitem__)


@pytest.mark.parametrize(
    ("name", "spec", "shape", "more", "why", "nearest"),
    [
        ("e.gate_up_proj", NVFP4, (2, 64, 6), {}, "with e8m0 scales", MXFP4),
        ("e.down_proj", INT4_GROUP, (2, 64, 6), {}, "with e8m0 scales", MXFP4),
        ("e.down_proj", INT8_ROW, (2, 64, 6), {}, "with e8m0 scales", None),
        ("e.down_proj", MXFP4, (2, 64, 6), {"axes": None}, "axis contracted", None),
        ("e.down_proj", MXFP4, (2, 48, 6), {}, "32 do not divide 48", None),
        (
            "e.down_proj",
            MXFP4,
            (2, 64, 6),
            {"act": ActivationSpec(QuantSpec(MXFP4.format, (32,)))},
            "activations",
            MXFP4,
        ),
        ("up.weight", MXFP4, (2, 64, 6), {}, "of experts", None),
    ],
)
def test_what_cannot_be_written_is_refused(
    name: str, spec: QuantSpec, shape: tuple[int, ...], more: dict[str, Any], why: str, nearest: QuantSpec | None
) -> None:
    assert EXPERTS_MXFP4.writing is not None
    meta = Meta(spec, shape, torch.bfloat16, **{"axes": (0, 2, 1), **more})
    assert why in str(EXPERTS_MXFP4.writing.refuses(name, meta))
    assert EXPERTS_MXFP4.writing.nearest(name, meta) == nearest
