"""Write golden calls of torchao's functions: torchao_calls_<version>.safetensors and torchao_calls_<version>.json.

One file pair for each of the releases 0.9, 0.12 and 0.18, with the calls that only it has, or that only it answers as
the compatibility layer does. Run it with a python that has the release installed; pennyweight is neither needed nor
imported:

    python -m venv oracle && oracle/bin/pip install torch==2.13.0 numpy safetensors==0.8.0
    oracle/bin/pip install --no-deps torchao==0.9.0          # then 0.12.0, then 0.18.0
    oracle/bin/python tests/golden/make_torchao_founding.py

torchao 0.12 does not import under torch 2.13 as it is: its file prototype/inductor/int8_sdpa_lowering.py fails, which
only fusion passes need that are not used here: :func:`without_fusion_passes` stands in for what imports it.
Everything runs on the CPU, with one thread and fixed seeds. README.md in this folder describes the files.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
VERSION = ".".join(importlib.metadata.version("torchao").split(".")[:2])


def without_fusion_passes() -> None:
    """An empty stand-in for torchao 0.12's inductor passes."""
    empty = types.ModuleType("torchao.prototype.inductor.fx_passes")
    empty._int8_sdpa_init = empty.register_da8w4_concat_linear_cpu_pass = lambda: None
    sys.modules.setdefault(empty.__name__, empty)


if VERSION == "0.12":
    without_fusion_passes()

prim = importlib.import_module("torchao.quantization.quant_primitives")
utils = importlib.import_module("torchao.quantization.utils")
granularity = importlib.import_module("torchao.quantization.granularity")
observer = importlib.import_module("torchao.quantization.observer")
M, D = prim.MappingType, prim.ZeroPointDomain


class Calls:
    """Records calls: their arguments and results, equal tensors once."""

    def __init__(self):
        self.tensors, self.by_content, self.calls = {}, {}, []

    def tensor(self, t):
        t = t.detach().contiguous()
        dtype = str(t.dtype).removeprefix("torch.")
        raw = t.view(torch.uint8) if t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else t
        digest = hashlib.sha256(raw.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        key = self.by_content.setdefault((digest, dtype, tuple(t.shape)), f"t{len(self.by_content)}")
        self.tensors.setdefault(key, raw.clone())
        return {"tensor": key} if raw is t else {"tensor": key, "dtype": dtype}

    def encode(self, v):
        if isinstance(v, torch.Tensor):
            return self.tensor(v)
        if isinstance(v, torch.dtype):
            return {"torch": str(v).removeprefix("torch.")}
        if isinstance(v, (M, D)):
            return {"enum": [type(v).__name__, v.name]}
        if isinstance(v, granularity.Granularity):
            return {"granularity": [type(v).__name__, *vars(v).values()]}
        if isinstance(v, dict):
            return {"dict": {k: self.encode(e) for k, e in v.items()}}
        return [self.encode(e) for e in v] if isinstance(v, (list, tuple)) else v

    def call(self, module, name, *args, approx=False, inputs=None, **kwargs):
        """Call a function; or, with ``inputs``, make an observer, show it the inputs and ask for its parameters."""
        entry = {"name": name, "args": self.encode(args), "kwargs": {k: self.encode(v) for k, v in kwargs.items()}}
        out = getattr(module, name)(*args, **kwargs)
        if inputs is not None:
            entry["inputs"] = self.encode(inputs)
            for x in inputs:
                out(x)
            out = out.calculate_qparams()
        if approx:  # sums and powers whose last bits depend on the processor
            entry["approx"] = True
        self.calls.append({**entry, "result": self.encode(out)})
        return out

    def write(self, out):
        stem = f"torchao_calls_{VERSION}"
        versions = {"torchao": importlib.metadata.version("torchao"), "torch": torch.__version__.split("+")[0]}
        save_file(self.tensors, out / f"{stem}.safetensors", metadata={"versions": json.dumps(versions)})
        lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in self.calls)
        (out / f"{stem}.json").write_text(f'{{"versions": {json.dumps(versions)},\n"calls": [\n{lines}\n]}}\n')


def inputs():
    generator = torch.Generator().manual_seed(9)
    w = torch.randn(4, 32, generator=generator)
    w[0], w[1], w[2, 5] = 0, w[1].abs() + 0.5, 4.0  # a zero row, a positive row, an outlier
    return {tag: w.to(dtype) for tag, dtype in DTYPES.items()}


BLOCKS = ((1, 32), (4, 32), (2, 16))


def old_affine(g):
    """0.9: domain and preserve_zero as arguments of one function, positional as its own callers pass them."""
    rows = (
        (M.ASYMMETRIC, torch.uint8, 0, 15, False, D.FLOAT),
        (M.ASYMMETRIC, torch.int8, None, None, True, D.INT),
        (M.SYMMETRIC, torch.int8, -8, 7, True, D.INT),
        (M.SYMMETRIC, torch.int8, None, None, True, D.NONE),
        (M.SYMMETRIC_NO_CLIPPING_ERR, torch.int8, -8, 7, True, D.NONE),
    )
    for w in inputs().values():
        for block in BLOCKS:
            for mapping, target, low, high, preserve, domain in rows:
                zero = w.dtype if domain is D.FLOAT else torch.int32
                # eps as large as this: below 2**-16 the reciprocals of float16 overflow there, and zeros become NaN
                options = (mapping, block, target, low, high, 1e-3, None, zero, preserve, domain)
                scale, zp = g.call(prim, "choose_qparams_affine", w, *options)
                codes = g.call(prim, "quantize_affine", w, block, scale, zp, target, low, high, domain)
                args = (codes, block, scale, zp, target, low, high, domain)
                g.call(prim, "dequantize_affine", *args, output_dtype=w.dtype)
                g.call(prim, "fake_quantize_affine", w, block, scale, zp, target, low, high, domain)


def min_max(g):
    """0.12: the float and empty domains from given ranges."""
    for w in inputs().values():
        low, high = w.amin(1), w.amax(1)
        for mapping, domain, preserve in (
            (M.ASYMMETRIC, D.FLOAT, False), (M.ASYMMETRIC, D.FLOAT, True), (M.ASYMMETRIC, D.INT, False),
            (M.ASYMMETRIC, D.NONE, True), (M.SYMMETRIC, D.NONE, True),
        ):  # fmt: skip
            zero = w.dtype if domain is D.FLOAT else torch.int32
            options = (mapping, [], torch.uint8, 0, 15, 1e-5, None, zero, preserve, domain)
            g.call(prim, "choose_qparams_affine_with_min_max", low, high, *options)


def old_float8(g):
    """0.9: the whole tensor, without a block size."""
    for w in inputs().values():
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            scale = g.call(prim, "choose_qparams_affine_float8", w, dtype)
            codes = g.call(prim, "quantize_affine_float8", w, scale, dtype)
            g.call(prim, "dequantize_affine_float8", codes, scale, w.dtype)


def blocked_float8(g, choose, **options):
    for w in inputs().values():
        w = w[1:3]  # torchao's scale of a zero row is 0
        for block in ((1, 32), (1, 16), (2, 32), *([[]] if VERSION == "0.12" else ())):
            for scale_dtype in (torch.float32, torch.float8_e8m0fnu):
                args = (w, list(block), torch.float8_e4m3fn, scale_dtype)
                scale = g.call(prim, choose, *args, **options, approx=scale_dtype is not torch.float32)
                codes = g.call(prim, "_quantize_affine_float8", w, scale, torch.float8_e4m3fn)
                g.call(prim, "_dequantize_affine_float8", codes, scale, w.dtype)


def groupwise(g):
    for w in inputs().values():
        for n_bit in (2, 4, 8):
            for dtype in (torch.float32, torch.bfloat16)[n_bit == 8 :]:
                codes, packed = g.call(utils, "groupwise_affine_quantize_tensor", w, n_bit, 16, dtype)
                g.call(utils, "groupwise_affine_dequantize_tensor", codes, packed, n_bit, 16)
            for preserve in (False, True):
                args = (w, n_bit, 16, torch.float32, D.INT, preserve)
                scale, zero = g.call(utils, "get_groupwise_affine_qparams", *args)
                args = (w, scale, zero, n_bit, 16, D.INT)
                codes = g.call(utils, "groupwise_affine_quantize_tensor_from_qparams", *args)
                args = (codes, *args[1:])
                g.call(utils, "groupwise_affine_dequantize_tensor_from_qparams", *args)
            g.call(utils, "get_group_qparams_symmetric", w, n_bit, 16)
        g.call(utils, "group_quantize_tensor_symmetric", w, 4, 16)
        g.call(utils, "compute_error", w, w * 0.5, approx=True)


def per_token(g):
    for w in inputs().values():
        g.call(utils, "per_token_dynamic_quant", w.reshape(2, 2, 32))
        g.call(utils, "dynamically_quantize_per_channel", w, -128, 127, torch.int8)


def fake(g):
    for w in inputs().values():
        for domain, mapping in ((D.INT, M.SYMMETRIC), (D.FLOAT, M.ASYMMETRIC), (D.NONE, M.SYMMETRIC)):
            choose = "_choose_qparams_affine_tinygemm" if domain is D.FLOAT else "choose_qparams_affine"
            scale, zero = g.call(prim, choose, w, mapping, (1, 16), torch.int8, -8, 7)
            zero = None if domain is D.NONE else zero
            args = (w * 1.5, (1, 16), scale, zero, torch.int8, -8, 7, domain)
            g.call(prim, "_fake_quantize_affine", *args)


def observers(g):
    for w in inputs().values():
        seen = [w[1:], w[1:] * 2 - 1]
        for kind in (granularity.PerTensor(), granularity.PerAxis(0), granularity.PerRow(), granularity.PerGroup(16)):
            for mapping, target in ((M.SYMMETRIC, torch.int8), (M.ASYMMETRIC, torch.uint8)):
                options = {"eps": 1e-6, "scale_dtype": torch.float32, "zero_point_dtype": torch.int32}
                g.call(observer, "AffineQuantizedMinMaxObserver", mapping, target, kind, **options, inputs=seen)


def record(g):
    if VERSION == "0.9":
        old_affine(g)
        old_float8(g)
    elif VERSION == "0.12":
        min_max(g)
        blocked_float8(g, "_choose_qparams_affine_float8")
    else:
        blocked_float8(g, "_choose_scale_float8", hp_value_lb=0.5, hp_value_ub=3.0)
        groupwise(g)
        per_token(g)
        fake(g)
        observers(g)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    calls = Calls()
    record(calls)
    calls.write(out)


if __name__ == "__main__":
    main()
