"""Names of torchao that there are not here: the releases that had them, and what to use instead. A table, not code."""
# ruff: noqa: E501 - rows of a table

from __future__ import annotations

__all__ = ["GONE", "why_missing"]

_QAT = "quantization-aware training is not offered yet; fine-tune the quantized weights (docs/tutorials/trainable_tensor.md)"
_SPARSE = "sparse weights are not offered; quantize the dense ones"
_GPTQ = "GPTQ is not offered yet; int4 in groups of 32 loses least without it"
_SMOOTH = "SmoothQuant is not offered yet; Int8DynamicActivationInt8WeightConfig scales activations per token"
_TRAIN = "low-precision training is not offered yet"
_GPU = "packs for one GPU; "
_HANDLER = "handled one operator inside; call that operator on the tensor"

# Path of a module or of a name in it -> (releases of torchao that had it, what to use instead).
GONE: dict[str, tuple[str, str]] = {
    "dtypes.*": ("0.9 to 0.17", f"{_GPU}to_affine_quantized_intx with PlainLayout()"),
    "dtypes._nf4tensor_api": ("0.9 to 0.16", "NF4WeightOnlyConfig"),
    "dtypes.floatx.*": ("0.9 to 0.15", f"{_GPU}FPXWeightOnlyConfig"),
    "dtypes.floatx.float8_layout.*": ("0.9 to 0.16", "Float8Tensor; scales have an axis for each of the tensor's"),
    "dtypes.floatx.floatx_tensor_core_layout.*": ("0.9 to 0.15", f"{_GPU}FPXWeightOnlyConfig"),
    "dtypes.nf4tensor.*": ("0.9 to 0.17", _HANDLER),
    "dtypes.uintx.*": ("0.9 to 0.15", f"{_GPU}Int8DynamicActivationInt4WeightConfig"),
    "dtypes.uintx.bitpacking.*": ("0.9 to 0.16", "pack and unpack"),
    "dtypes.uintx.block_sparse_layout.*": ("0.9 to 0.16", _SPARSE),
    "dtypes.uintx.dyn_int8_act_int4_wei_cpu_layout.*": ("0.12 to 0.16", "Int8DynamicActivationInt4WeightConfig"),
    "dtypes.uintx.int4_xpu_layout.*": ("0.11 to 0.16", f"{_GPU}Int4CPULayout()"),
    "dtypes.uintx.marlin_sparse_layout.*": ("0.9 to 0.15", _SPARSE),
    "dtypes.uintx.packed_linear_int8_dynamic_activation_intx_weight_layout.*": (
        "0.10 to 0.16", "Int8DynamicActivationIntxWeightConfig, whose weights are packed for the processor at hand",
    ),
    "dtypes.uintx.semi_sparse_layout.*": ("0.9 to 0.16", _SPARSE),
    "dtypes.uintx.uint4_layout.*": ("0.9 to 0.17", "UIntXWeightOnlyConfig(torch.uint4)"),
    "float8": ("0.5 on", _TRAIN),
    "float8.*": ("0.5 on", _TRAIN),
    "float8.inference.*": ("0.7 on", "F.linear with a Float8Tensor"),
    "kernel": ("0.3 to 0.18", "torchao.kernel.intmm"),
    "kernel.*": ("0.3 to 0.18", _SPARSE),
    "ops": ("0.3 on", "F.linear with a quantized weight: torchao's own operators are those of its kernels"),
    "prototype._nf4tensor_api": ("0.13 on", "NF4WeightOnlyConfig"),
    "prototype.attention": ("0.16 on", "quantized attention is not offered yet"),
    "prototype.autoround": ("0.6 to 0.18", "AutoRound is not offered yet; int4 in groups of 32 loses least without it"),
    "prototype.blockwise_fp8": ("0.10 to 0.12", "Float8WeightOnlyConfig(granularity=PerBlock((128, 128)))"),
    "prototype.blockwise_fp8_inference": ("0.13 on", "Float8WeightOnlyConfig(granularity=PerBlock((128, 128)))"),
    "prototype.blockwise_fp8_training": ("0.13 on", _TRAIN),
    "prototype.common": ("0.2 to 0.18", "torch.profiler"),
    "prototype.dora": ("0.3 to 0.12", "PEFT's DoRA"),
    "prototype.dtypes.*": ("0.3 to 0.12", "IntxWeightOnlyConfig(torch.int2)"),
    "prototype.dtypes.bitnet": ("0.3 to 0.12", "SpecConfig(TERNARY_TENSOR)"),
    "prototype.dtypes.uint2": ("0.3 to 0.12", "UIntXWeightOnlyConfig(torch.uint2)"),
    "prototype.dtypes.uintgen": ("0.3 to 0.12", "UIntXWeightOnlyConfig"),
    "prototype.dtypes.uintx.bitpacking.*": ("0.15 on", "pack and unpack"),
    "prototype.float8_opaque_tensor": ("0.16 on", "Float8DynamicActivationFloat8WeightConfig"),
    "prototype.float8nocompile": ("0.7 on", _TRAIN),
    "prototype.fp8_sdpa_inference": ("0.17 on", "quantized attention is not offered yet"),
    "prototype.galore": ("0.2 to 0.11", _TRAIN),
    "prototype.inductor": ("0.10 on", "nothing: products are operators of pennyweight in the graph"),
    "prototype.mx_formats.*": ("0.7 on", "MXDynamicActivationMXWeightConfig or NVFP4WeightOnlyConfig"),
    "prototype.mx_formats.config.*": ("0.7 to 0.16", "MXDynamicActivationMXWeightConfig"),
    "prototype.mx_formats.inference_workflow.*": ("0.14 on", "MXDynamicActivationMXWeightConfig or NVFP4WeightOnlyConfig"),
    "prototype.mx_formats.mx_tensor.*": ("0.3 on", "MXTensor.to_mx and its dequantize()"),
    "prototype.mx_formats.nvfp4_tensor.*": ("0.12 on", "NVFP4WeightOnlyConfig"),
    "prototype.mx_formats": ("0.3 on", "MXTensor.to_mx, MXDynamicActivationMXWeightConfig"),
    "prototype.paretoq": ("0.10 to 0.18", _QAT),
    "prototype.profiler": ("0.4 to 0.13", "torch.profiler"),
    "prototype.quant_logger": ("0.17 and 0.18", "the report of quantize_"),
    "prototype.quantization.*": ("0.11 on", "UIntXWeightOnlyConfig; Int8DynamicActivationIntxWeightConfig"),
    "prototype.quantization.quant_api.*": ("0.15 on", "UIntXWeightOnlyConfig; Float8StaticActivationFloat8WeightConfig"),
    "prototype.quantization.codebook_groupwise": ("0.14 on", "codebooks found by k-means are not offered yet"),
    "prototype.quantization.codebook_utils": ("0.15 on", "codebooks found by k-means are not offered yet"),
    "prototype.quantization.embedding": ("0.11 on", "IntxWeightOnlyConfig with a filter for nn.Embedding"),
    "prototype.quantization.float8_static_quant": ("0.16 on", "Float8StaticActivationFloat8WeightConfig"),
    "prototype.quantization.int8_lut_tensor": ("0.16 on", "Int8WeightOnlyConfig"),
    "prototype.quantization.subgraph_utils": ("0.7 to 0.13", "pennyweight.recommend"),
    "prototype.quantization.uintx": ("0.16 on", "UIntXWeightOnlyConfig"),
    "prototype.splitk": ("0.3 to 0.12", "nothing: it was a GPU kernel"),
    "quantization.autoquant.*": ("0.3 to 0.16", "candidates=[...] of pennyweight.recommend"),
    "quantization.quant_api.*": ("0.5 on", "register_quantize_module_handler"),
    "quantization.quantize_.*": ("0.12", "Int4Tensor"),
    "quantization.quantize_.common.*": ("0.16 on", _SMOOTH),
    "quantization.quantize_.common.protocol": ("0.16 on", _SMOOTH),
    "quantization.quantize_.int4_groupwise_preshuffle_tensor": ("0.12", f"{_GPU}Int4Tensor"),
    "quantization.quantize_.workflows.nf4.nf4_tensor.*": ("0.17 on", _HANDLER),
    "testing.float8": ("0.8 to 0.12", _TRAIN),
    "testing.pt2e": ("0.11 on", "graphs are not annotated"),
    "testing.training": ("0.13 on", _TRAIN),
    "dtypes.fbgemm_fp8_tensor": ("0.11 to 0.13", "Float8Tensor"),
    "dtypes.fbgemm_int4_tensor": ("0.11 to 0.13", "Int4Tensor"),
    "dtypes.uintx.gemlite_layout": ("0.9 to 0.16", "UIntXWeightOnlyConfig: kernels are chosen from the table"),
    "dtypes.uintx.marlin_qqq_tensor": ("0.9 to 0.15", "Int8DynamicActivationInt4WeightConfig"),
    "experimental": ("0.6 on", "the configs of torchao.quantization, which run everywhere"),
    "optim": ("0.10 on", "8- and 4-bit optimizer states are not offered yet; bitsandbytes has them"),
    "prototype.awq": ("0.7 on", "AWQ is not offered yet; int4 in groups of 32 loses least without it"),
    "prototype.gptq": ("0.16 on", _GPTQ),
    "prototype.hqq": ("0.5 on", "int4 by round-to-nearest; the formulas are in torchao.quantization.quant_primitives"),
    "prototype.low_bit_optim": ("0.4 to 0.9", "8- and 4-bit optimizer states are not offered yet; bitsandbytes has them"),
    "prototype.moe_quant": ("0.11 to 0.15", "FqnToConfig, which reaches experts by the names of their parameters"),
    "prototype.moe_training": ("0.12 on", _TRAIN),
    "prototype.parq": ("0.10 on", _QAT),
    "prototype.pat": ("0.17 on", _SPARSE),
    "prototype.qat": ("0.13 on", _QAT),
    "prototype.quantization.autoquant_v2": ("0.7 to 0.13", "pennyweight.recommend"),
    "prototype.quantization.codebook": ("0.8 on", "codebooks found by k-means are not offered yet; NF4WeightOnlyConfig is"),
    "prototype.quantization.codebook_coreml": ("0.14 on", "CoreML's own tools"),
    "prototype.quantization.gguf": ("0.11 on", "GGUF files are not offered yet"),
    "prototype.quantization.module_swap": ("0.7 on", "quantize_, which keeps the modules"),
    "prototype.quantized_training": ("0.5 on", _TRAIN),
    "prototype.smoothquant": ("0.7 on", _SMOOTH),
    "prototype.sparsity": ("0.2 to 0.18", _SPARSE),
    "prototype.spinquant": ("0.7 to 0.18", "rotations are not offered yet"),
    "prototype.tensor_conversion": ("0.14 on", "nothing: weights are packed for the hardware when they are quantized or loaded"),
    "quantization.ALL_AUTOQUANT_CLASS_LIST": ("0.7 to 0.16", "candidates=[...] of pennyweight.recommend"),
    "quantization.DEFAULT_AUTOQUANT_CLASS_LIST": ("0.3 to 0.16", "candidates=[...] of pennyweight.recommend"),
    "quantization.DEFAULT_FLOAT_AUTOQUANT_CLASS_LIST": ("0.7 to 0.16", "candidates=[...] of pennyweight.recommend"),
    "quantization.DEFAULT_INT4_AUTOQUANT_CLASS_LIST": ("0.4 to 0.16", "candidates=[...] of pennyweight.recommend"),
    "quantization.DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST": ("0.8 to 0.16", _SPARSE),
    "quantization.GEMLITE_INT4_AUTOQUANT_CLASS_LIST": ("0.9 to 0.16", "candidates=[...] of pennyweight.recommend"),
    "quantization.OTHER_AUTOQUANT_CLASS_LIST": ("0.5 to 0.16", "candidates=[...] of pennyweight.recommend"),
    "quantization.FbgemmConfig": ("0.11 to 0.13", "Int4WeightOnlyConfig or Float8DynamicActivationFloat8WeightConfig"),
    "quantization.GPTQ": ("0.2 to 0.15", _GPTQ),
    "quantization.GPTQ_MT": ("0.7 to 0.11", _GPTQ),
    "quantization.Int4GroupwisePreshuffleTensor": ("0.12", f"{_GPU}Int4Tensor"),
    "quantization.Int4WeightOnlyGPTQQuantizer": ("0.1 to 0.15", _GPTQ),
    "quantization.Int8DynActInt4WeightGPTQQuantizer": ("0.1 to 0.9", _GPTQ),
    "quantization.MultiTensor": ("0.7 to 0.15", _GPTQ),
    "quantization.MultiTensorInputRecorder": ("0.7 to 0.15", _GPTQ),
    "quantization.SmoothFakeDynQuantMixin": ("0.1 to 0.15", _SMOOTH),
    "quantization.SmoothFakeDynamicallyQuantizedLinear": ("0.1 to 0.15", _SMOOTH),
    "quantization.get_scale": ("0.1 to 0.15", _SMOOTH),
    "quantization.intx_quantization_aware_training": ("0.7 on", _QAT),
    "quantization.marlin_qqq": ("0.9 to 0.15", "Int8DynamicActivationInt4WeightConfig"),
    "quantization.prototype": ("0.4 to 0.10", _QAT),
    "quantization.pt2e": ("0.11 on", "quantize the weights with quantize_ and export that; graphs are not annotated"),
    "quantization.qat": ("0.7 on", _QAT),
    "quantization.set_smooth_fq_attribute": ("0.1 to 0.15", _SMOOTH),
    "quantization.smooth_fq_linear_to_inference": ("0.1 to 0.15", _SMOOTH),
    "quantization.smoothquant": ("0.1 to 0.15", _SMOOTH),
    "quantization.swap_linear_with_smooth_fq_linear": ("0.1 to 0.15", _SMOOTH),
    "sparsity": ("0.1 to 0.18", _SPARSE),
    "swizzle": ("0.10 to 0.18", "nothing: it reordered weights for AMD GPUs"),
}  # fmt: skip


def why_missing(module: str, name: str | None) -> str | None:
    """The sentence about a module (``name`` None) or a name in it; None where there is none to be said.

    A module is looked up by its path and its parents', a name by its own, then as one of ``module.*``, which says what
    the names that a module had besides are good for.
    """
    paths = [module] if name is None else [f"{module}.{name}".lstrip("."), f"{module}.*"]
    if name is None:
        while "." in paths[-1]:
            paths.append(paths[-1].rpartition(".")[0])
    elif module == "quantization.quant_api":  # what quantization exports, it exports too
        paths.insert(1, f"quantization.{name}")
    for path in paths:
        if path in GONE:
            releases, instead = GONE[path]
            if path.endswith("*"):
                return f"pennyweight has no such name; for what torchao {releases} had here besides, use instead: {instead}"
            return f"torchao {releases} had it, pennyweight has not; use instead: {instead}"
    return None
