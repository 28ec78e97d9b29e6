"""Table of torchao names that are missing here: the releases that had them, and replacements."""
# ruff: noqa: E501 - rows of a table

from __future__ import annotations

_QAT = "quantize_ with pennyweight.QATConfig, which accepts every config"
_QAT_LAYER = "quantize_ with QATConfig: prepared layers keep their module"
_SPARSE = "sparse weights are not supported; pennyweight.sparsify_ sets weights to zero, which quantize_ keeps at zero"
_GPTQ = 'pennyweight.quantize_(model, config, calibration=batches, algorithm="gptq")'
_SMOOTH = (
    'pennyweight.quantize_(model, Int8DynamicActivationInt8WeightConfig(), calibration=batches, algorithm="smooth")'
)
_TRAIN = "quantize_ with a config of pennyweight.training: Float8TrainingConfig, Int8MixedPrecisionTrainingConfig, MXTrainingConfig"
_GPU = "packs for one GPU; "
_STATES = "states are AffineQuantizedTensor, with dequantize() and from_float()"

# Path of a module or of a name in it -> (releases of torchao that had it, from their wheels; replacement).
GONE: dict[str, tuple[str, str]] = {
    "float8": ("0.4 on", _TRAIN),
    "kernel": ("0.1 on", "torchao.kernel.intmm"),
    "ops": ("0.2 on", "F.linear with a quantized weight: torchao's own operators are those of its kernels"),
    "prototype.attention": ("0.17 on", "quantized attention is not supported yet"),
    "prototype.autoround": ("0.5 on", 'pennyweight.quantize_(model, config, calibration=batches, algorithm=["gptq", "distill"])'),
    "prototype.blockwise_fp8": ("0.12", "Float8WeightOnlyConfig(granularity=PerBlock((128, 128)))"),
    "prototype.blockwise_fp8_inference": ("0.13 on", "Float8WeightOnlyConfig(granularity=PerBlock((128, 128)))"),
    "prototype.blockwise_fp8_training": ("0.13 on", "pennyweight.training.Float8TrainingConfig('blockwise')"),
    "prototype.common": ("0.2 on", "torch.profiler"),
    "prototype.dora": ("0.2 to 0.9", "PEFT's DoRA"),
    "prototype.float8_opaque_tensor": ("0.15 on", "Float8DynamicActivationFloat8WeightConfig"),
    "prototype.float8nocompile": ("0.8 on", _TRAIN),
    "prototype.fp8_sdpa_inference": ("0.16 on", "quantized attention is not supported yet"),
    "prototype.galore": ("0.2 to 0.11", "low-rank gradients are not supported; use optimizers with 8-bit states"),
    "prototype.inductor": ("0.12 on", "nothing: products are operators of pennyweight in the graph"),
    "prototype.mx_formats": ("0.3 on", "MXTensor.to_mx, MXDynamicActivationMXWeightConfig"),
    "prototype.paretoq": ("0.11 on", _QAT),
    "prototype.profiler": ("0.8 and 0.9", "torch.profiler"),
    "prototype.quant_logger": ("0.17 on", "the report of quantize_"),
    "prototype.quantization.codebook_groupwise": ("0.13 on", "pennyweight.CodebookWeightOnlyConfig finds codebooks by k-means"),
    "prototype.quantization.codebook_utils": ("0.13 on", "pennyweight.CodebookWeightOnlyConfig finds codebooks by k-means"),
    "prototype.quantization.embedding": ("0.14 on", "IntxWeightOnlyConfig with a filter for nn.Embedding"),
    "prototype.quantization.float8_static_quant": ("0.16 on", "Float8StaticActivationFloat8WeightConfig"),
    "prototype.quantization.int8_lut_tensor": ("0.14 on", "Int8WeightOnlyConfig"),
    "prototype.quantization.subgraph_utils": ("0.8 to 0.16", "pennyweight.recommend"),
    "prototype.quantization.uintx": ("0.17 on", "UIntXWeightOnlyConfig"),
    "prototype.splitk": ("0.4 to 0.9", "nothing: it was a GPU kernel"),
    "testing.float8": ("0.6 to 0.11", _TRAIN),
    "testing.pt2e": ("0.11 on", "graphs are not annotated"),
    "testing.training": ("0.12 on", _TRAIN),
    "experimental": ("0.7 on", "the configs of torchao.quantization, which run everywhere"),
    "prototype.awq": ("0.6 on", 'pennyweight.quantize_(model, config, calibration=batches, algorithm="awq")'),
    "prototype.gptq": ("0.16 on", _GPTQ),
    "prototype.hqq": ("0.2 on", 'pennyweight.quantize_(model, config, algorithm="hqq"); the formulas are in torchao.quantization.quant_primitives'),
    "optim.quant_utils": ("0.10 on", _STATES),
    "optim.subclass_4bit": ("0.10 on", _STATES),
    "optim.subclass_8bit": ("0.10 on", _STATES),
    "optim.subclass_fp8": ("0.10 on", _STATES),
    "prototype.low_bit_optim.quant_utils": ("0.4 to 0.10", _STATES),
    "prototype.low_bit_optim.subclass_4bit": ("0.4 to 0.10", _STATES),
    "prototype.low_bit_optim.subclass_8bit": ("0.4 to 0.10", _STATES),
    "prototype.low_bit_optim.subclass_fp8": ("0.4 to 0.10", _STATES),
    "prototype.moe_quant": ("0.11 to 0.15", "FqnToConfig, which selects experts by parameter name"),
    "prototype.moe_training": ("0.12 on", "pennyweight.training.grouped_mm"),
    "prototype.parq": ("0.10 on", "pennyweight.optim.QuantOptimizer"),
    "prototype.pat": ("0.17 on", "pennyweight.optim.PruneOptimizer"),
    "prototype.qat": ("0.13 on", _QAT),
    "prototype.quantization.autoquant_v2": ("0.7 to 0.16", "pennyweight.recommend"),
    "prototype.quantization.codebook": ("0.8 on", "pennyweight.CodebookWeightOnlyConfig finds codebooks by k-means"),
    "prototype.quantization.codebook_coreml": ("0.12 on", "CoreML's own tools"),
    "prototype.quantization.gguf": ("0.11 on", 'pennyweight.convert(folder, "model.gguf", to="gguf")'),
    "prototype.quantization.module_swap": ("0.10 on", "quantize_, which keeps the modules"),
    "prototype.quantized_training": ("0.5 on", _TRAIN),
    "prototype.smoothquant": ("0.7 on", _SMOOTH),
    "prototype.sparsity": ("0.7 on", _SPARSE),
    "prototype.spinquant": ("0.7 on", 'pennyweight.quantize_(model, config, calibration=batches, algorithm=["rotate", "gptq"])'),
    "quantization.ALL_AUTOQUANT_CLASS_LIST": ("0.8 to 0.15", "candidates=[...] of pennyweight.recommend"),
    "quantization.DEFAULT_AUTOQUANT_CLASS_LIST": ("0.5 to 0.15", "candidates=[...] of pennyweight.recommend"),
    "quantization.DEFAULT_FLOAT_AUTOQUANT_CLASS_LIST": ("0.7 to 0.15", "candidates=[...] of pennyweight.recommend"),
    "quantization.DEFAULT_INT4_AUTOQUANT_CLASS_LIST": ("0.5 to 0.15", "candidates=[...] of pennyweight.recommend"),
    "quantization.DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST": ("0.8 to 0.15", _SPARSE),
    "quantization.GEMLITE_INT4_AUTOQUANT_CLASS_LIST": ("0.8 to 0.15", "candidates=[...] of pennyweight.recommend"),
    "quantization.OTHER_AUTOQUANT_CLASS_LIST": ("0.6 to 0.15", "candidates=[...] of pennyweight.recommend"),
    "quantization.GPTQ": ("0.1 to 0.15", _GPTQ),
    "quantization.GPTQ_MT": ("0.6 to 0.11", _GPTQ),
    "quantization.Int4WeightOnlyGPTQQuantizer": ("0.1 to 0.15", _GPTQ),
    "quantization.Int8DynActInt4WeightGPTQQuantizer": ("0.1 to 0.11", _GPTQ),
    "quantization.MultiTensor": ("0.12 to 0.15", _GPTQ),
    "quantization.MultiTensorInputRecorder": ("0.12 to 0.15", _GPTQ),
    "quantization.SmoothFakeDynQuantMixin": ("0.1 to 0.15", _SMOOTH),
    "quantization.SmoothFakeDynamicallyQuantizedLinear": ("0.1 to 0.15", _SMOOTH),
    "quantization.get_scale": ("0.1 to 0.15", _SMOOTH),
    "quantization.prototype.qat._module_swap_api": ("0.7 on", _QAT),
    "quantization.prototype.qat.affine_fake_quantized_tensor": ("0.7 on", _QAT),
    "quantization.pt2e": ("0.11 on", "quantize the weights with quantize_ and export that; graphs are not annotated"),
    "quantization.qat.affine_fake_quantized_tensor": ("0.7 to 0.15", _QAT),
    "quantization.set_smooth_fq_attribute": ("0.1 to 0.15", _SMOOTH),
    "quantization.smooth_fq_linear_to_inference": ("0.1 to 0.15", _SMOOTH),
    "quantization.smoothquant": ("0.1 to 0.15", _SMOOTH),
    "quantization.swap_linear_with_smooth_fq_linear": ("0.1 to 0.15", _SMOOTH),
    "prototype.quantization.dynamic_activation_lut": ("0.13", "Int8DynamicActivationIntxWeightConfig"),
    "prototype.quantization.int4.Int4WeightOnlyOpaqueTensorConfig": ("0.17", "Int4WeightOnlyConfig"),
    "prototype.quantization.int4.inference_workflow.Int4WeightOnlyOpaqueTensorConfig": ("0.17", "Int4WeightOnlyConfig"),
    "prototype.scaled_grouped_mm": ("0.11", "pennyweight.training.grouped_mm"),
    "quantization.Int4MarlinSparseTensor": ("0.13 to 0.15", _SPARSE),
    "quantization.IntxUnpackedTensor": ("0.13", "IntxUnpackedToInt8Tensor"),
    "quantization.quant_primitives.choose_qparams_gguf": ("0.11", "GGUF files are not offered yet"),
    "quantization.quant_primitives.dequantize_gguf": ("0.11", "GGUF files are not offered yet"),
    "quantization.quant_primitives.quantize_gguf": ("0.11", "GGUF files are not offered yet"),
    "quantization.quantize_.workflows.Int4MarlinSparseTensor": ("0.13 to 0.15", _SPARSE),
    "quantization.quantize_.workflows.IntxUnpackedTensor": ("0.13", "IntxUnpackedToInt8Tensor"),
    "quantization.quantize_.workflows.int4.int4_marlin_sparse_tensor": ("0.13 to 0.15", _SPARSE),
    "quantization.quantize_.workflows.intx.IntxUnpackedTensor": ("0.13", "IntxUnpackedToInt8Tensor"),
    "quantization.quantize_.workflows.intx.intx_unpacked_tensor": ("0.13", "IntxUnpackedToInt8Tensor"),
    "sparsity": ("0.1 on", _SPARSE),
    "swizzle": ("0.12 on", "nothing: it reordered weights for AMD GPUs"),
}  # fmt: skip

# Path of a module -> replacement for its missing names.
BESIDES: dict[str, str] = {
    "dtypes.floatx.float8_layout": "Float8Tensor; scales have an axis for each of the tensor's",
    **dict.fromkeys(
        (
            "float8",
            "float8.config",
            "float8.float8_linear",
            "float8.float8_linear_utils",
            "float8.float8_utils",
            "float8.fsdp_utils",
        ),
        _TRAIN,
    ),
    **dict.fromkeys(
        [f"prototype.quantized_training{end}" for end in ("", ".bitnet", ".int8", ".int8_mixed_precision")], _TRAIN
    ),
    "float8.inference": "F.linear with a Float8Tensor",
    "kernel": _SPARSE,
    "optim.adam": "a rule of pennyweight.optim.update_rules",
    "prototype.low_bit_optim.adam": "a rule of pennyweight.optim.update_rules",
    "prototype.dtypes": "IntxWeightOnlyConfig(torch.int2)",
    "prototype.mx_formats": "MXDynamicActivationMXWeightConfig or NVFP4WeightOnlyConfig; to train, pennyweight.training.MXTrainingConfig",
    "prototype.mx_formats.config": "MXDynamicActivationMXWeightConfig; to train, pennyweight.training.MXTrainingConfig",
    "prototype.mx_formats.inference_workflow": "MXDynamicActivationMXWeightConfig or NVFP4WeightOnlyConfig",
    "prototype.mx_formats.mx_tensor": "MXTensor.to_mx and its dequantize()",
    "prototype.mx_formats.nvfp4_tensor": "NVFP4WeightOnlyConfig",
    "prototype.quantization": "UIntXWeightOnlyConfig; Int8DynamicActivationIntxWeightConfig",
    "prototype.quantization.quant_api": "UIntXWeightOnlyConfig; Float8StaticActivationFloat8WeightConfig",
    "quantization.autoquant": "candidates=[...] of pennyweight.recommend",
    "quantization.prototype.qat": _QAT_LAYER,
    "quantization.prototype.qat.embedding": _QAT_LAYER,
    "quantization.prototype.qat.linear": _QAT_LAYER,
    "quantization.qat": _QAT_LAYER,
    "quantization.qat.embedding": _QAT_LAYER,
    "quantization.qat.linear": _QAT_LAYER,
    "quantization.quant_api": "register_quantize_module_handler",
}


def why_missing(module: str, name: str | None) -> str | None:
    """The message about a missing module (``name`` None) or a name in it; None if there is none.

    A module is looked up by its path and its parents', a name by its own, then by the entry of its module in :data:`BESIDES`.
    """
    if name is None:
        parts = module.split(".")
        paths = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    else:
        paths = [f"{module}.{name}".lstrip(".")]
        if module == "quantization.quant_api":  # also exports the names of quantization
            paths.append(f"quantization.{name}")
    for path in paths:
        if path in GONE:
            releases, instead = GONE[path]
            return f"torchao {releases} had it, pennyweight does not; use instead: {instead}"
    if name is not None and module in BESIDES:
        return f"pennyweight has no such name; for torchao's other names here, use instead: {BESIDES[module]}"
    return None
