"""Golden cases of the affine primitives: mapping types, target dtypes, block sizes, options."""

from functools import partial

import torch
from _record import DTYPES, MAPPINGS
from torchao.quantization import quant_primitives as prim
from torchao.quantization.quant_primitives import MappingType

SYM, ASYM = MappingType.SYMMETRIC, MappingType.ASYMMETRIC
API = "torchao.quantization.quant_primitives."

# name -> target_dtype, quant_min, quant_max
TARGETS = {
    "int8": (torch.int8, None, None),
    "uint8": (torch.uint8, None, None),
    "int4": (torch.int8, -8, 7),
    "uint4": (torch.uint4, None, None),
}

# What Int8Tensor passes to choose_qparams_affine
INT8_TENSOR_OPTIONS = {
    "eps": torch.finfo(torch.float32).eps,
    "scale_dtype": torch.float32,
    "zero_point_dtype": torch.int8,
    "keepdim": True,
}


def round_trip(x, block, target, scale, zero_point, quantize, dequantize):
    codes = quantize(x, block, scale, zero_point, *target)
    back = dequantize(codes, block, scale, zero_point, *target, output_dtype=x.dtype)
    out = {"codes": codes, "scale": scale, "dequantized": back}
    return out if zero_point is None else out | {"zero_point": zero_point}


def affine(x, mapping, block, target, **options):
    qparams = prim.choose_qparams_affine(x, mapping, block, *target, **options)
    return round_trip(x, block, target, *qparams, prim.quantize_affine, prim.dequantize_affine)


def no_preserve_zero(x, block, target):
    qparams = prim._choose_qparams_affine_dont_preserve_zero(x, ASYM, block, *target)
    return round_trip(x, block, target, *qparams, prim.quantize_affine, prim.dequantize_affine)


def tinygemm(x, block, target, eps):
    qparams = prim._choose_qparams_affine_tinygemm(x, ASYM, block, *target, eps)
    return round_trip(x, block, target, *qparams, prim._quantize_affine_tinygemm, prim._dequantize_affine_tinygemm)


def no_zero_point(x, block, target):
    scale, _ = prim.choose_qparams_affine(x, SYM, block, *target)
    functions = prim._quantize_affine_no_zero_point, prim._dequantize_affine_no_zero_point
    return round_trip(x, block, target, scale, None, *functions)


def arguments(mapping, block, target, **more):
    dtype, quant_min, quant_max = target
    return {
        "mapping_type": mapping,
        "block_size": list(block),
        "target_dtype": dtype,
        "quant_min": quant_min,
        "quant_max": quant_max,
        **more,
    }


def add_affine(g, name, key, x, mapping, block, target, **options):
    args = arguments(mapping, block, target, **options)
    make = partial(affine, x, mapping, block, target, **options)
    g.case(name, API + "choose_qparams_affine", args, {"input": key}, make)


def add_no_preserve_zero(g, name, key, x, block, target):
    api, args = API + "_choose_qparams_affine_dont_preserve_zero", arguments(ASYM, block, target)
    g.case(name, api, args, {"input": key}, partial(no_preserve_zero, x, block, target))


def add_tinygemm(g, name, key, x, block, target, eps):
    api, args = API + "_choose_qparams_affine_tinygemm", arguments(ASYM, block, target, eps=eps)
    g.case(name, api, args, {"input": key}, partial(tinygemm, x, block, target, eps))


def matrix(g, t):
    for tag in DTYPES:
        key = f"p.{tag}"
        x = t[key]
        for block_name, block in {"row": (1, x.shape[1]), "group32": (1, 32), "tensor": tuple(x.shape)}.items():
            tail = f"{block_name}.{tag}"
            for name, target in TARGETS.items():
                for map_name, mapping in MAPPINGS.items():
                    add_affine(g, f"affine.{map_name}.{name}.{tail}", key, x, mapping, block, target)
            for name in ("int8", "uint4"):
                add_no_preserve_zero(g, f"affine_no_preserve_zero.{name}.{tail}", key, x, block, TARGETS[name])
                add_tinygemm(g, f"affine_tinygemm.{name}.{tail}", key, x, block, TARGETS[name], None)
            name = f"affine_tinygemm.uint4.{block_name}.eps1e-6.{tag}"
            add_tinygemm(g, name, key, x, block, TARGETS["uint4"], 1e-6)
            g.case(
                f"affine_no_zero_point.int8.{tail}",
                API + "_quantize_affine_no_zero_point",
                arguments(SYM, block, TARGETS["int8"]),
                {"input": key},
                partial(no_zero_point, x, block, TARGETS["int8"]),
                note="scale from choose_qparams_affine",
            )
        for map_name, mapping in MAPPINGS.items():
            name = f"affine_options.{map_name}.int8.group32.{tag}"
            add_affine(g, name, key, x, mapping, (1, 32), TARGETS["int8"], **INT8_TENSOR_OPTIONS)


def vector(g, t):
    key, block = "vec.f32", (4,)
    for name, target in TARGETS.items():
        for map_name, mapping in MAPPINGS.items():
            add_affine(g, f"vec.{map_name}.{name}.f32", key, t[key], mapping, block, target)
        add_tinygemm(g, f"vec.tinygemm.{name}.f32", key, t[key], block, target, None)
        add_no_preserve_zero(g, f"vec.no_preserve_zero.{name}.f32", key, t[key], block, target)


ALL = (matrix, vector)
