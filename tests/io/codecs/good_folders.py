"""A small good folder of every kind that other libraries write: what bad_folders.py changes one thing of.

Names and sizes are fixed: a layer ``m`` (``a.m`` of HQQ, experts of gpt-oss), a float norm beside it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

import pennyweight as pw
from pennyweight.core import spec as specs
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.io.codecs.torchao.flattened_safetensors import flatten_tensor_state_dict
from tests.io.codecs import test_awq, test_bitsandbytes, test_compressed_tensors, test_fp8_block, test_gptq, test_hqq
from tests.io.codecs import test_mxfp4 as mxfp4

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Folder:
    """tensors of model.safetensors, its metadata, config.json's quantization_config, and the rest of config.json.

    text     config.json itself, where it is not what follows from the two
    weights  names of the quantized tensors
    """

    tensors: Tensors
    method: Any
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=lambda: {"model_type": "x"})
    text: bytes | None = None

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        config = {**self.config, "quantization_config": self.method}
        (path / "config.json").write_bytes(json.dumps(config).encode() if self.text is None else self.text)
        (path / "model.safetensors").write_bytes(save(self.tensors, self.metadata or None))
        return path

    def put(self, name: str, tensor: Tensor | None) -> "Folder":
        """With one tensor replaced, added, or taken out."""
        tensors = {**self.tensors, name: tensor}
        plain = {k: t.clone(memory_format=torch.contiguous_format) for k, t in tensors.items() if t is not None}
        return replace(self, tensors=plain)

    def say(self, **changes: Any) -> "Folder":
        """With keys of quantization_config replaced; ... takes one out."""
        return replace(self, method={k: v for k, v in {**self.method, **changes}.items() if v is not ...})


def _compressed(name: str, shape: tuple[int, int] = (16, 64)) -> Folder:
    t = test_compressed_tensors
    return Folder(t.named("m", t.compressed(name, shape, torch.float16)), t.config_of(name))


def _by_words() -> Folder:
    """compressed-tensors of 3 bits as releases before the dense packing stored it."""
    t = test_compressed_tensors
    codes = torch.randint(-4, 4, (16, 480)).to(torch.int8)
    parts = {"weight_packed": t.pack_by_words(codes, 3), "weight_scale": torch.rand(16, 15).half(),
             "weight_shape": torch.tensor([16, 480])}  # fmt: skip
    return Folder(t.named("m", parts), t.config_of("W3"))


def _gptq(version: str, bits: int = 4, order: str = "none", sym: bool = False, outputs: int = 32) -> Folder:
    s = test_gptq.sample(bits, version=version, order=order, sym=sym, name="m", outputs=outputs)
    return Folder(s.tensors, s.method)


def _bnb(kind: str, nested: bool, shape: tuple[int, int] = (8, 128)) -> Folder:
    tensors, _ = test_bitsandbytes.quantized(kind, shape, 64, torch.float16, nested)
    return Folder(tensors, test_bitsandbytes.config(kind))


def _fp8(shape: tuple[int, ...], **more: Any) -> Folder:
    codes, scale = test_fp8_block.layer(shape, (16, 16))
    name = "m.weight" if len(shape) == 2 else "m"
    method = {**test_fp8_block.CONFIG, "weight_block_size": [16, 16], **more}
    return Folder({name: codes, f"{name}_scale_inv": scale}, method)


def _fp8_static() -> Folder:
    folder = _fp8((16, 16), activation_scheme="static", weight_block_size=None)
    return folder.put("m.weight_scale_inv", torch.tensor(0.3)).put("m.activation_scale", torch.tensor(0.7))


def _hqq(bits: int, axis: int) -> Folder:
    return Folder(test_hqq.layer((8, 32), bits, 8, axis)[0], test_hqq.CONFIG)


def _torchao(spec: QuantSpec, act: ActivationSpec | None = None) -> Folder:
    w = pw.AffineQuantizedTensor.from_float(torch.randn(8, 64), spec, act=act)
    tensors, metadata = flatten_tensor_state_dict({"m.weight": w, "m.bias": torch.zeros(8)})
    return Folder(tensors, {"quant_method": "torchao"}, metadata)


_TINYGEMM = specs.TINYGEMM.with_(block=(32,))
MAKE: dict[str, Callable[[], Folder]] = {
    **{
        f"compressed-tensors {name}": lambda name=name: _compressed(name)
        for name in ("W4", "W4-asym", "W3-asym", "W4-channel-asym", "W4-tensor-asym", "W8A8", "W8A8-asym",
                     "W8A8-static", "W8A8-group", "FP8", "FP8-dynamic", "NVFP4A16", "MXFP4", "MXFP6", "MXFP8")
    },
    "compressed-tensors FP8-block": lambda: _compressed("FP8-block", (130, 140)),
    "compressed-tensors by words": _by_words,
    "gptq": lambda: _gptq("gptq"),
    "gptq sym": lambda: _gptq("gptq", sym=True),
    "gptq 3 bits": lambda: _gptq("gptq", 3, outputs=24),
    "gptq g_idx": lambda: _gptq("gptq", order="random"),
    "gptq_v2": lambda: _gptq("gptq_v2"),
    "gptq_v2 g_idx": lambda: _gptq("gptq_v2", order="random"),
    "awq": lambda: Folder(test_awq.layer(16, 64, 32), test_awq.config(32)),
    "bitsandbytes nf4": lambda: _bnb("nf4", False),
    "bitsandbytes nf4 nested": lambda: _bnb("nf4", True),
    "bitsandbytes fp4": lambda: _bnb("fp4", False, (7, 19)),
    "bitsandbytes fp4 nested": lambda: _bnb("fp4", True, (9, 96)),
    "bitsandbytes int8": lambda: Folder(test_bitsandbytes.int8((4, 16), torch.float16)[0], test_bitsandbytes.INT8),
    "fp8": lambda: _fp8((24, 40)),
    "fp8 experts": lambda: _fp8((2, 24, 40)),
    "fp8 static": _fp8_static,
    "mxfp4": lambda: Folder(mxfp4.experts((2, 8, 2)), mxfp4.CONFIG),
    "hqq 4 bits": lambda: _hqq(4, 1),
    "hqq 3 bits": lambda: _hqq(3, 0),
    "hqq 8 bits": lambda: _hqq(8, 1),
    "torchao int8": lambda: _torchao(specs.INT8_ROW),
    "torchao int8 with inputs": lambda: _torchao(specs.INT8_ROW, ActivationSpec(specs.INT8_ROW)),
    "torchao intx": lambda: _torchao(QuantSpec(INT8, (32,), zero_point=True)),
    "torchao intx of 4 bits": lambda: _torchao(QuantSpec(INT4, (32,))),
    "torchao int4": lambda: _torchao(_TINYGEMM),
    "torchao fp8": lambda: _torchao(specs.FP8_ROW),
    "torchao mxfp8": lambda: _torchao(specs.MXFP8),
    "torchao mxfp4": lambda: _torchao(specs.MXFP4),
    "torchao nvfp4": lambda: _torchao(specs.NVFP4),
}  # fmt: skip


def good(kind: str) -> Folder:
    """The folder of that kind, the same each time."""
    torch.manual_seed(0)
    folder = MAKE[kind]()
    return (
        replace(folder, tensors={**folder.tensors, "norm.weight": torch.ones(4, dtype=torch.float16)})
        if ("torchao" not in kind)
        else folder
    )  # torchao describes every tensor
