"""Golden cases of quantize_: a linear layer under each weight and activation config that runs on a CPU."""

from functools import partial

import torch
from _record import DTYPES, MAPPINGS, check
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine
from torchao.quantization.quantize_.common import _choose_quant_func_and_quantize_tensor
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    _apply_int8_act_asym_per_token_quant_dequant,
)
from torchao.quantization.utils import (
    get_groupwise_affine_qparams,
    groupwise_affine_dequantize_tensor_from_qparams,
    groupwise_affine_quantize_tensor_from_qparams,
    pack_tinygemm_scales_and_zeros,
)

SYM, ASYM = MappingType.SYMMETRIC, MappingType.ASYMMETRIC
API = "torchao.quantization."


def quantized(weight, bias, config):
    """An nn.Linear (bias cut to the number of rows of the weight) after quantize_."""
    n, k = weight.shape
    linear = torch.nn.Linear(k, n, bias=True, dtype=weight.dtype)
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    linear.bias = torch.nn.Parameter(bias[:n].clone(), requires_grad=False)
    model = torch.nn.Sequential(linear)
    quantize_(model, config)
    return model[0]


def inputs(weight, tag, *more):
    return {"weight": f"{weight}.{tag}", **{k: f"{k}.{tag}" for k in ("x", *more, "bias")}}


def parts(w):
    return {"codes": w.qdata, "scale": w.scale, "zero_point": w.zero_point}


def int8_weight_only(g, t):
    def make(tag, gran_name, gran):
        config = Int8WeightOnlyConfig(granularity=gran, set_inductor_config=False)
        linear = quantized(t[f"w.{tag}"], t[f"bias.{tag}"], config)
        w, bias, xint = linear.weight, linear.bias, t[f"xint.{tag}"]
        out = parts(w) | {"output": linear(t[f"x.{tag}"])}
        if tag == "bf16" or (tag, gran_name) in (("f32", "per_row"), ("f16", "group32")):
            out["dequantized"] = w.dequantize()
        if gran_name != "group32":
            # x and the codes are integers: their products add up exactly, in any order
            out["output_xint"] = linear(xint)
            want = (xint.double() @ w.qdata.double().T).to(bias.dtype) * w.scale.flatten().to(bias.dtype) + bias
            check(torch.equal(out["output_xint"], want), "the float matmul of this CPU is not exact on integers")
        return out

    for tag in DTYPES:
        for gran_name, gran in (("per_row", PerRow()), ("per_tensor", PerTensor()), ("group32", PerGroup(32))):
            g.case(
                f"int8_wo.{gran_name}.{tag}",
                API + "Int8WeightOnlyConfig",
                {"granularity": gran},
                inputs("w", tag, "xint"),
                partial(make, tag, gran_name, gran),
                approx=("output",),
            )


def int8_results(linear, x):
    w = linear.weight
    act = _choose_quant_func_and_quantize_tensor(
        x, w.act_quant_kwargs, scale=w.act_quant_scale, zero_point=w.act_quant_zero_point
    )
    out = linear(x)
    # int8 matmuls saturate on CPUs without VNNI; what is stored must be exact
    want = ((act.qdata.long() @ w.qdata.long().T).float() * act.scale).to(x.dtype)
    if w.act_quant_kwargs.mapping_type == ASYM:
        want = want - (act.zero_point.float() * act.scale * w.qdata.sum(-1).float()).to(x.dtype)
    want = (want * w.scale.flatten() + linear.bias).to(x.dtype)
    check(torch.allclose(out, want, rtol=0, atol=0, equal_nan=True), "the int8 matmul of this CPU is not exact")
    return parts(w) | {f"act_{k}": v for k, v in parts(act).items()} | {"output": out}


def int8_dynamic(g, t):
    variants = {
        "sym": {"act_mapping_type": SYM, "granularity": PerRow()},
        "asym": {"act_mapping_type": ASYM, "granularity": PerRow()},
        "sym_per_tensor": {"act_mapping_type": SYM, "granularity": PerTensor()},
        "asym_per_tensor": {"act_mapping_type": ASYM, "granularity": PerTensor()},
        "sym_act_tensor_w_row": {"act_mapping_type": SYM, "granularity": [PerTensor(), PerRow()]},
        "sym_reduce_range": {"act_mapping_type": SYM, "granularity": PerRow(), "reduce_range": True},
        "asym_reduce_range": {"act_mapping_type": ASYM, "granularity": PerRow(), "reduce_range": True},
    }

    def make(tag, args):
        config = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, **args)
        return int8_results(quantized(t[f"w.{tag}"], t[f"bias.{tag}"], config), t[f"x.{tag}"])

    for tag in DTYPES:
        for name, args in variants.items():
            api = API + "Int8DynamicActivationInt8WeightConfig"
            g.case(f"int8_dyn.{name}.{tag}", api, args, inputs("w", tag), partial(make, tag, args))


def int8_static(g, t):
    per_token = torch.tensor([[0.02], [0.03], [0.04], [0.18], [0.025]])
    zero_point = torch.tensor([[-17]], dtype=torch.int8)
    # name -> mapping, activation granularity, act_quant_scale, act_quant_zero_point
    variants = {
        "sym_per_tensor": (SYM, PerTensor(), torch.tensor([[0.03]]), None),
        "sym_per_row": (SYM, PerRow(), per_token, None),
        "asym_per_tensor": (ASYM, PerTensor(), torch.tensor([[0.045]]), zero_point),
    }

    def make(tag, args, scale, zp):
        config = Int8StaticActivationInt8WeightConfig(
            act_quant_scale=scale, act_quant_zero_point=zp, set_inductor_config=False, **args
        )
        return int8_results(quantized(t[f"w.{tag}"], t[f"bias.{tag}"], config), t[f"x.{tag}"])

    for tag in DTYPES:
        for name, (mapping, gran, scale, zp) in variants.items():
            args = {"act_mapping_type": mapping, "granularity": [gran, PerRow()]}
            g.case(
                f"int8_static.{name}.{tag}",
                API + "Int8StaticActivationInt8WeightConfig",
                args,
                inputs("w", tag),
                partial(make, tag, args, scale, zp),
                note="act_quant_scale is act_scale"
                + (", act_quant_zero_point is act_zero_point" if zp is not None else ""),
            )


def intx_weight_only(g, t):
    def make(tag, bits, args):
        config = IntxWeightOnlyConfig(**args)
        linear = quantized(t[f"v.{tag}"], t[f"bias.{tag}"], config)
        out = parts(linear.weight) | {"output": linear(t[f"x.{tag}"])}
        if bits in (4, 8) or (bits, tag) == (2, "bf16"):
            out["dequantized"] = linear.weight.dequantize()
        return out

    def add(name, tag, bits, gran, mapping, scale_dtype=None):
        dtype = getattr(torch, f"int{bits}")
        args = {"weight_dtype": dtype, "granularity": gran, "mapping_type": mapping, "scale_dtype": scale_dtype}
        api = API + "IntxWeightOnlyConfig"
        g.case(name, api, args, inputs("v", tag), partial(make, tag, bits, args), approx=("output",))

    for tag in DTYPES:
        for bits in (1, 2, 4, 8) if tag == "f16" else range(1, 9):
            for gran_name, gran in (("axis0", PerAxis(0)), ("group32", PerGroup(32))):
                for map_name, mapping in MAPPINGS.items():
                    add(f"intx.int{bits}.{gran_name}.{map_name}.{tag}", tag, bits, gran, mapping)
    for tag, scale_tag in (("f32", "bf16"), ("f16", "bf16"), ("bf16", "f32")):
        name = f"intx.int4.group32.sym.scale_{scale_tag}.{tag}"
        add(name, tag, 4, PerGroup(32), SYM, DTYPES[scale_tag])


def int8_dynamic_int4(g, t):
    def make(tag, args):
        linear = quantized(t[f"v.{tag}"], t[f"bias.{tag}"], Int8DynamicActivationIntxWeightConfig(**args))
        x, block = t[f"x.{tag}"], (1, 128)
        scale, zp = choose_qparams_affine(x, ASYM, block, torch.int8, -128, 127, zero_point_dtype=torch.int8)
        return parts(linear.weight) | {
            "dequantized": linear.weight.dequantize(),
            "act_codes": quantize_affine(x, block, scale, zp, torch.int8, -128, 127),
            "act_scale": scale,
            "act_zero_point": zp,
            "act_dequantized": _apply_int8_act_asym_per_token_quant_dequant(x),
            "output": linear(x),
        }

    for tag in DTYPES:
        for map_name, mapping in MAPPINGS.items():
            args = {
                "weight_dtype": torch.int4,
                "weight_granularity": PerGroup(32),
                "weight_mapping_type": mapping,
                "weight_scale_dtype": None,
                "act_mapping_type": ASYM,
            }
            g.case(
                f"int8_dyn_int4.group32.{map_name}.{tag}",
                API + "Int8DynamicActivationIntxWeightConfig",
                args,
                inputs("v", tag),
                partial(make, tag, args),
                approx=("output",),
            )


def int4_weight_only(g, t):
    def make(tag, group):
        w = t[f"w.{tag}"]
        scale, zero = get_groupwise_affine_qparams(w, 4, group, w.dtype)
        codes = groupwise_affine_quantize_tensor_from_qparams(w, scale, zero, 4, group)
        scale_and_zero = pack_tinygemm_scales_and_zeros(scale, zero, w.dtype)
        linear = quantized(w, t[f"bias.{tag}"], PrototypeInt4WeightOnlyConfig(group_size=group))
        # the packed bytes depend on the CPU, the codes do not
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        check(torch.equal(packed, linear.weight.qdata), "the config has other int4 codes")
        check(torch.equal(scale_and_zero, linear.weight.scale_and_zero), "the config has other scales")
        out = {
            "codes": codes.to(torch.uint8),
            "scale": scale,
            "zero_point": zero,
            "scale_and_zero": scale_and_zero,
            "output": linear(t[f"x.{tag}"]),
        }
        if tag == "bf16" or group == 32:
            out["dequantized"] = groupwise_affine_dequantize_tensor_from_qparams(codes, scale, zero, 4, group)
        return out

    for tag in DTYPES:
        for group in (32, 64, 128):
            g.case(
                f"int4_wo.group{group}.{tag}",
                "torchao.prototype.quantization.int4.PrototypeInt4WeightOnlyConfig",
                {"group_size": group},
                inputs("w", tag),
                partial(make, tag, group),
                approx=("output",),
                note="tinygemm: codes 0..15 (torchao: int32), float zero_point; scale_and_zero is [K/g, N, 2]",
            )


def float8_weight_only(g, t):
    variants = [("e4m3fn", "per_row", PerRow(), "nz"), ("e5m2", "per_row", PerRow(), "nz")]
    variants += [("e4m3fn", "per_tensor", PerTensor(), "nz"), ("e4m3fn", "group32", PerGroup(32), "nz")]
    variants += [("e4m3fn", "per_row.zero_row", PerRow(), "v")]

    def make(tag, weight, args):
        config = Float8WeightOnlyConfig(set_inductor_config=False, **args)
        linear = quantized(t[f"{weight}.{tag}"], t[f"bias.{tag}"], config)
        w = linear.weight
        return {
            "codes": w.qdata.view(torch.uint8),
            "scale": w.scale,
            "dequantized": w.dequantize(),
            "output": linear(t[f"x.{tag}"]),
        }

    for tag in DTYPES:
        for fmt, gran_name, gran, weight in variants:
            args = {"weight_dtype": getattr(torch, f"float8_{fmt}"), "granularity": gran}
            g.case(
                f"float8_wo.{fmt}.{gran_name}.{tag}",
                API + "Float8WeightOnlyConfig",
                args,
                inputs(weight, tag),
                partial(make, tag, weight, args),
                approx=("output",),
                note="codes are float8 bytes",
            )


ALL = (
    int8_weight_only,
    int8_dynamic,
    int8_static,
    intx_weight_only,
    int8_dynamic_int4,
    int4_weight_only,
    float8_weight_only,
)
