"""Golden cases of number formats: MX, NVFP4, NF4, the optimizers' dynamic maps, small floats."""

from functools import partial

import torch
from _record import check
from torchao.optim.quant_utils import create_dynamic_map
from torchao.prototype.custom_fp_utils import _f32_to_floatx_unpacked, _floatx_unpacked_to_f32
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization import to_nf4


def mx(g, t):
    elements = {
        "e4m3fn": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "fp6_e2m3": "fp6_e2m3",
        "fp6_e3m2": "fp6_e3m2",
        "fp4_e2m1": torch.float4_e2m1fn_x2,
    }

    def make(x, element, mode):
        q = MXTensor.to_mx(x, element, 32, mode)
        codes = q.qdata.view(torch.uint8)
        if element == torch.float4_e2m1fn_x2:
            codes = unpack_uint4(codes).reshape(x.shape)
        return {"codes": codes, "scale": q.scale.view(torch.uint8), "dequantized": q.dequantize(x.dtype)}

    def add(name, key, element, mode):
        g.case(
            name,
            "torchao.prototype.mx_formats.mx_tensor.to_mx",
            {"elem_dtype": element, "block_size": 32, "scaling_mode": mode},
            {"input": key},
            partial(make, t[key], element, mode),
            note="codes: one element per byte; scale: e8m0 bytes",
        )

    for tag in ("f32", "bf16"):
        for name, element in elements.items():
            for mode in ScaleCalculationMode:
                add(f"mx.{name}.{mode.value}.{tag}", f"m.{tag}", element, mode)
    add("mx.e4m3fn.floor.f16", "x.f16", torch.float8_e4m3fn, ScaleCalculationMode.FLOOR)


def nvfp4(g, t):
    def make(x, two_level):
        outer = per_tensor_amax_to_scale(x.abs().max()) if two_level else None
        scale, packed = nvfp4_quantize(x, 16, outer)
        q = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
        check(torch.equal(q.qdata, packed), "NVFP4Tensor has other codes than nvfp4_quantize")
        out = {
            "codes": unpack_uint4(packed).reshape(x.shape),
            "scale": scale.view(torch.uint8),
            "dequantized": q.dequantize(x.dtype),
        }
        return out | {"per_tensor_scale": outer} if two_level else out

    for tag in ("f32", "bf16"):
        for name in ("one_level", "two_level"):
            g.case(
                f"nvfp4.{name}.{tag}",
                "torchao.prototype.mx_formats.nvfp4_tensor.nvfp4_quantize",
                {"block_size": 16, "per_tensor_scale": name == "two_level"},
                {"input": f"f.{tag}"},
                partial(make, t[f"f.{tag}"], name == "two_level"),
                note="codes: one fp4 code per byte; scale: float8_e4m3fn bytes",
            )


def nf4(g, t):
    def make(w, scaler_block):
        q = to_nf4(w, 64, scaler_block)
        return {
            "codes": torch.stack([q.quantized_data >> 4, q.quantized_data & 15], dim=-1).reshape(w.shape),
            "scalers": q.quantized_scalers,
            "scaler_factor": q.quantization_factor,
            "scaler_mean": q.scaler_mean,
            "table": q.nf4,
            "dequantized": q.get_original_weight(),
        }

    args = {"block_size": 64, "scaler_block_size": 256}
    for tag in ("f32", "bf16"):
        make_it = partial(make, t[f"nf4w.{tag}"], 256)
        note = "codes: one index per byte"
        g.case(f"nf4.{tag}", "torchao.quantization.to_nf4", args, {"weight": f"nf4w.{tag}"}, make_it, note=note)
    zero = t["nf4w.f32"][:32].clone()
    zero[1, :64] = 0.0
    indices = make(zero, 64)["codes"][1, :64].unique().tolist()
    g.skipped["nf4.zero_block"] = f"a zero block is scaled by 0/0; its indices, argmin over NaN, are here {indices}"


def dynamic_maps(g, t):
    variants = {
        "signed8": (True, 7, 8),
        "unsigned8": (False, 7, 8),
        "signed4": (True, 3, 4),
        "unsigned4": (False, 3, 4),
    }

    def make(args):
        return {"map": torch.tensor(create_dynamic_map(*args), dtype=torch.float32)}

    for name, args in variants.items():
        g.case(
            f"dynamic_map.{name}",
            "torchao.optim.quant_utils.create_dynamic_map",
            dict(zip(("signed", "max_exponent_bits", "total_bits"), args, strict=True)),
            {},
            partial(make, args),
            approx=("map",),
            note="ascending; compare element by element with rtol=1e-6, because torch.linspace gives other last bits "
            "on some CPUs",
        )


def floatx_values(formats):
    """Every positive value of the formats, the midpoints between them and their neighbours, and the extremes."""
    values = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-3, -1e-3, 0.1, -0.3, 1 / 3, 2 / 3, 3.3, -5.1]
    values += [7.49, 7.51, 27.9, 28.1, 30.0, -30.0, 100.0, -1e6, 3e38, float("inf"), float("-inf")]
    for ebits, mbits in formats.values():
        table = _floatx_unpacked_to_f32(torch.arange(1 << (ebits + mbits), dtype=torch.uint8), ebits, mbits)
        middle = (table[1:] + table[:-1]) / 2
        up, down = (torch.nextafter(middle, torch.full_like(middle, s)) for s in (1e9, -1e9))
        for part in (table, middle, -middle[:6], up[:6], down[:6], up[-4:], down[-4:], -up[-2:]):
            values += part.tolist()
    bits = torch.tensor(values, dtype=torch.float32).view(torch.int32)  # keeps -0.0 apart from 0.0
    return torch.tensor(list(dict.fromkeys(bits.tolist())), dtype=torch.int32).view(torch.float32)


def floatx(g, t):
    formats = {"e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}
    x = floatx_values(formats)
    g.put("floatx.values", x)

    def make(ebits, mbits):
        codes = _f32_to_floatx_unpacked(x, ebits, mbits)
        every = torch.arange(1 << (1 + ebits + mbits), dtype=torch.uint8)
        return {
            "codes": codes,
            "decoded": _floatx_unpacked_to_f32(codes, ebits, mbits),
            "table": _floatx_unpacked_to_f32(every, ebits, mbits),
        }

    for name, (ebits, mbits) in formats.items():
        g.case(
            f"floatx.{name}",
            "torchao.prototype.custom_fp_utils._f32_to_floatx_unpacked",
            {"ebits": ebits, "mbits": mbits},
            {"input": "floatx.values"},
            partial(make, ebits, mbits),
            note="table[i] is the value of code i",
        )


ALL = (mx, nvfp4, nf4, dynamic_maps, floatx)
