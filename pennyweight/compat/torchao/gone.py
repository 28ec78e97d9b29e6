"""Names of torchao that there are not here: the releases that had them, and what to use instead. A table, not code."""

from __future__ import annotations

__all__ = ["GONE", "why_missing"]

_QAT = "quantization-aware training is not offered yet; fine-tune the quantized weights (docs/tutorials/trainable_tensor.md)"
_SPARSE = "sparse weights are not offered; quantize the dense ones"
_GPTQ = "GPTQ is not offered yet; int4 in groups of 32 loses least without it"
_SMOOTH = "SmoothQuant is not offered yet; Int8DynamicActivationInt8WeightConfig scales activations per token"
_TRAIN = "low-precision training is not offered yet"
_GPU = "packs for one GPU; "

# Path of a module or of a name in it -> (releases of torchao that had it, what to use instead).
GONE: dict[str, tuple[str, str]] = {
    "autoquant": ("0.3 to 0.16", "from torchao.quantization import autoquant, or pennyweight.recommend"),
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
    "quantization.Float8DynamicActivationFloat8SemiSparseWeightConfig": ("0.10 to 0.16", _SPARSE),
    "quantization.GPTQ": ("0.2 to 0.15", _GPTQ),
    "quantization.GPTQ_MT": ("0.7 to 0.11", _GPTQ),
    "quantization.Int4GroupwisePreshuffleTensor": ("0.12", f"{_GPU}Int4Tensor"),
    "quantization.Int4PlainInt32Tensor": ("0.13 on", f"{_GPU}Int4Tensor"),
    "quantization.Int4PreshuffledTensor": ("0.13 on", f"{_GPU}Int4Tensor"),
    "quantization.Int4TilePackedTo4dTensor": ("0.13 on", f"{_GPU}Int4Tensor"),
    "quantization.Int4WeightOnlyGPTQQuantizer": ("0.1 to 0.15", _GPTQ),
    "quantization.Int8DynActInt4WeightGPTQQuantizer": ("0.1 to 0.9", _GPTQ),
    "quantization.IntxOpaqueTensor": ("0.15 on", "IntxUnpackedToInt8Tensor; weights are packed when quantize_ stores them"),
    "quantization.MultiTensor": ("0.7 to 0.15", _GPTQ),
    "quantization.MultiTensorInputRecorder": ("0.7 to 0.15", _GPTQ),
    "quantization.SmoothFakeDynQuantMixin": ("0.1 to 0.15", _SMOOTH),
    "quantization.SmoothFakeDynamicallyQuantizedLinear": ("0.1 to 0.15", _SMOOTH),
    "quantization.WeightOnlyInt8QuantLinear": ("0.1 to 0.14", "quantize_(model, Int8WeightOnlyConfig())"),
    "quantization.change_linear_weights_to_int4_woqtensors": ("0.1 to 0.12", "quantize_(model, Int4WeightOnlyConfig())"),
    "quantization.change_linear_weights_to_int8_dqtensors": (
        "0.1 to 0.12", "quantize_(model, Int8DynamicActivationInt8WeightConfig())",
    ),
    "quantization.change_linear_weights_to_int8_woqtensors": ("0.1 to 0.12", "quantize_(model, Int8WeightOnlyConfig())"),
    "quantization.dynamic_quant": ("0.1 to 0.14", "quantize_(model, Int8DynamicActivationInt8WeightConfig())"),
    "quantization.get_scale": ("0.1 to 0.15", _SMOOTH),
    "quantization.intx_quantization_aware_training": ("0.7 on", _QAT),
    "quantization.marlin_qqq": ("0.9 to 0.15", "Int8DynamicActivationInt4WeightConfig"),
    "quantization.prototype": ("0.4 to 0.10", _QAT),
    "quantization.pt2e": ("0.11 on", "quantize the weights with quantize_ and export that; graphs are not annotated"),
    "quantization.qat": ("0.7 on", _QAT),
    "quantization.quantize_.workflows.int4.int4_plain_int32_tensor": ("0.14 on", f"{_GPU}Int4Tensor"),
    "quantization.quantize_.workflows.int4.int4_preshuffled_tensor": ("0.13 on", f"{_GPU}Int4Tensor"),
    "quantization.quantize_.workflows.int4.int4_tile_packed_to_4d_tensor": ("0.14 on", f"{_GPU}Int4Tensor"),
    "quantization.quantize_.workflows.intx.intx_opaque_tensor": ("0.15 on", "IntxUnpackedToInt8Tensor"),
    "quantization.set_smooth_fq_attribute": ("0.1 to 0.15", _SMOOTH),
    "quantization.smooth_fq_linear_to_inference": ("0.1 to 0.15", _SMOOTH),
    "quantization.smoothquant": ("0.1 to 0.15", _SMOOTH),
    "quantization.subclass": ("0.1 to 0.14", "the tensors of torchao.quantization"),
    "quantization.swap_linear_with_smooth_fq_linear": ("0.1 to 0.15", _SMOOTH),
    "quantization.weight_only": ("0.1 to 0.14", "quantize_(model, Int8WeightOnlyConfig())"),
    "sparsity": ("0.1 to 0.18", _SPARSE),
    "swizzle": ("0.10 to 0.18", "nothing: it reordered weights for AMD GPUs"),
}  # fmt: skip


def why_missing(module: str, name: str | None) -> str | None:
    """The sentence about a module (``name`` None) or a name in it, or one of its parents'; None: torchao has none such."""
    path = module if name is None else f"{module}.{name}" if module else name
    while path:
        if path in GONE:
            releases, instead = GONE[path]
            return f"torchao {releases} had it, pennyweight has not; use instead: {instead}"
        path = path.rpartition(".")[0] if name is None else ""
    # What quantization exports, it exports from quant_api too.
    return why_missing("quantization", name) if name is not None and module == "quantization.quant_api" else None
