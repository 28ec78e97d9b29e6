"""Table of torchao names that are missing here: the releases that had them, and replacements."""
# ruff: noqa: E501 - rows of a table

from __future__ import annotations

_QAT = "quantize_ with pennyweight.QATConfig, which accepts every config"
_QAT_LAYER = "quantize_ with QATConfig: prepared layers keep their module"
_SPARSE = "sparse weights are not supported; pennyweight.sparsify_ sets weights to zero, which quantize_ keeps at zero"
_GPTQ = 'pennyweight.quantize_(model, config, calibration=batches, algorithm="gptq")'
_TRAIN = "quantize_ with a config of pennyweight.training: Float8TrainingConfig, Int8MixedPrecisionTrainingConfig, MXTrainingConfig"
_GPU = "packs for one GPU; "
_STATES = "states are AffineQuantizedTensor, with dequantize() and from_float()"
_HANDLER = "handled one operator inside; call that operator on the tensor"

# Path of a module or of a name in it -> (releases of torchao that had it, from their wheels; replacement).
GONE: dict[str, tuple[str, str]] = {
    "dtypes._nf4tensor_api": ("0.10 to 0.15", "NF4WeightOnlyConfig"),
    "float8": ("0.4 on", _TRAIN),
    "kernel": ("0.1 on", "torchao.kernel.intmm"),
    "ops": ("0.2 on", "F.linear with a quantized weight: torchao's own operators are those of its kernels"),
    "prototype._nf4tensor_api": ("0.16 on", "NF4WeightOnlyConfig"),
    "prototype.attention": ("0.17 on", "quantized attention is not supported yet"),
    "prototype.autoround.autoround_llm": ("0.5 on", "prepare_model_for_applying_auto_round_ with your own batches"),
    "prototype.autoround.eval_autoround": ("0.5 on", "prepare_model_for_applying_auto_round_, then pennyweight.compare"),
    "prototype.blockwise_fp8": ("0.12", "Float8WeightOnlyConfig(granularity=PerBlock((128, 128)))"),
    "prototype.blockwise_fp8_inference": ("0.13 on", "Float8WeightOnlyConfig(granularity=PerBlock((128, 128)))"),
    "prototype.blockwise_fp8_training": ("0.13 on", "pennyweight.training.Float8TrainingConfig('blockwise')"),
    "prototype.common": ("0.2 on", "torch.profiler"),
    "prototype.dora": ("0.2 to 0.9", "PEFT's DoRA"),
    "prototype.dtypes.bitnet": ("0.3 to 0.9", "SpecConfig(TERNARY_TENSOR)"),
    "prototype.dtypes.uint2": ("0.3 to 0.9", "UIntXWeightOnlyConfig(torch.uint2)"),
    "prototype.dtypes.uintgen": ("0.3 to 0.9", "UIntXWeightOnlyConfig"),
    "prototype.float8_opaque_tensor": ("0.15 on", "Float8DynamicActivationFloat8WeightConfig"),
    "prototype.float8nocompile": ("0.8 on", _TRAIN),
    "prototype.fp8_sdpa_inference": ("0.16 on", "quantized attention is not supported yet"),
    "prototype.galore": ("0.2 to 0.11", "low-rank gradients are not supported; use optimizers with 8-bit states"),
    "prototype.inductor": ("0.12 on", "nothing: products are operators of pennyweight in the graph"),
    "prototype.mx_formats": ("0.3 on", "MXTensor.to_mx, MXDynamicActivationMXWeightConfig"),
    "prototype.paretoq": ("0.11 on", _QAT),
    "prototype.profiler": ("0.8 and 0.9", "torch.profiler"),
    "prototype.quantization.codebook_groupwise.codebook_quantized_tensor": ("0.13 on", "GroupwiseLutWeightConfig: it was packed for ARM processors"),
    "prototype.quantization.embedding": ("0.14 on", "IntxWeightOnlyConfig with a filter for nn.Embedding"),
    "prototype.quantization.float8_static_quant": ("0.16 on", "Float8StaticActivationFloat8WeightConfig"),
    "prototype.quantization.int8_lut_tensor": ("0.14 on", "Int8WeightOnlyConfig"),
    "prototype.quantization.subgraph_utils": ("0.8 to 0.16", "pennyweight.recommend"),
    "prototype.quantization.uintx": ("0.17 on", "UIntXWeightOnlyConfig"),
    "prototype.splitk": ("0.4 to 0.9", "nothing: it was a GPU kernel"),
    "quantization.quantize_.int4_groupwise_preshuffle_tensor": ("0.12", f"{_GPU}Int4Tensor"),
    "testing.float8": ("0.6 to 0.11", _TRAIN),
    "testing.pt2e": ("0.11 on", "graphs are not annotated"),
    "testing.training": ("0.12 on", _TRAIN),
    "dtypes.fbgemm_fp8_tensor": ("0.12 and 0.13", "Float8Tensor"),
    "dtypes.fbgemm_int4_tensor": ("0.12", "Int4Tensor"),
    "dtypes.uintx.gemlite_layout": ("0.8 to 0.16", "UIntXWeightOnlyConfig: kernels are chosen from the table"),
    "dtypes.uintx.marlin_qqq_tensor": ("0.8 to 0.15", "Int8DynamicActivationInt4WeightConfig"),
    "experimental": ("0.7 on", "the configs of torchao.quantization, which run everywhere"),
    "prototype.gptq.gptq_example": ("0.16 on", _GPTQ),
    "quantization.GPTQ.GenericGPTQRunner": ("0.3 to 0.11", _GPTQ),
    "prototype.hqq.hqq_tinygemm_linear": ("0.2 on", 'pennyweight.quantize_(model, config, algorithm="hqq"); the formulas are in torchao.quantization.quant_primitives'),
    "prototype.hqq.kernels": ("0.2 on", "F.linear with a quantized weight: they were GPU kernels"),
    "prototype.hqq.mixed_mm.triton_mixed_mm": ("0.2 on", "F.linear with a quantized weight: it was a GPU kernel"),
    "prototype.hqq.triton_mixed_mm": ("0.2 on", "F.linear with a quantized weight: it was a GPU kernel"),
    "optim.quant_utils": ("0.10 on", _STATES),
    "optim.subclass_4bit": ("0.10 on", _STATES),
    "optim.subclass_8bit": ("0.10 on", _STATES),
    "optim.subclass_fp8": ("0.10 on", _STATES),
    "prototype.low_bit_optim.quant_utils": ("0.4 to 0.10", _STATES),
    "prototype.low_bit_optim.subclass_4bit": ("0.4 to 0.10", _STATES),
    "prototype.low_bit_optim.subclass_8bit": ("0.4 to 0.10", _STATES),
    "prototype.low_bit_optim.subclass_fp8": ("0.4 to 0.10", _STATES),
    "prototype.moe_quant.llama4_quant": ("0.11 to 0.15", "MoEQuantConfig; it was a script that loads a model when imported"),
    "prototype.moe_training": ("0.12 on", "pennyweight.training.grouped_mm"),
    "prototype.parq": ("0.10 on", "pennyweight.optim.QuantOptimizer"),
    "prototype.pat": ("0.17 on", "pennyweight.optim.PruneOptimizer"),
    "prototype.qat": ("0.13 on", _QAT),
    "prototype.quantization.module_swap": ("0.10 on", "quantize_, which keeps the modules"),
    "prototype.quantized_training": ("0.5 on", _TRAIN),
    "prototype.sparsity": ("0.7 on", _SPARSE),
    "prototype.spinquant._hadamard_matrices.get_had156": ("0.7 on", "get_hadK(156 * 2**n) with n >= 1"),
    "prototype.spinquant._hadamard_matrices.get_had172": ("0.7 on", "get_hadK(172 * 2**n), which uses a larger matrix"),
    "prototype.spinquant._hadamard_matrices.get_had52": ("0.7 on", "get_hadK(52 * 2**n) with n >= 1"),
    "quantization.FbgemmConfig": ("0.12 and 0.13", "Int4WeightOnlyConfig or Float8DynamicActivationFloat8WeightConfig"),
    "quantization.Int4GroupwisePreshuffleTensor": ("0.12", f"{_GPU}Int4Tensor"),
    "quantization.marlin_qqq": ("0.7 to 0.15", "Int8DynamicActivationInt4WeightConfig"),
    "quantization.prototype.qat._module_swap_api": ("0.7 on", _QAT),
    "quantization.prototype.qat.affine_fake_quantized_tensor": ("0.7 on", _QAT),
    "quantization.pt2e": ("0.11 on", "quantize the weights with quantize_ and export that; graphs are not annotated"),
    "quantization.qat.affine_fake_quantized_tensor": ("0.7 to 0.15", _QAT),
    "prototype.dtypes.floatx": ("0.15", f"{_GPU}FPXWeightOnlyConfig"),
    "prototype.dtypes.uintx.GemlitePackedLayout": ("0.15 and 0.16", "UIntXWeightOnlyConfig: kernels are chosen from the table"),
    "prototype.dtypes.uintx.MarlinQQQTensor": ("0.15", "Int8DynamicActivationInt4WeightConfig"),
    "prototype.dtypes.uintx.block_sparse_layout": ("0.15 and 0.16", _SPARSE),
    "prototype.dtypes.uintx.dyn_int8_act_int4_wei_cpu_layout": ("0.15 and 0.16", "Int8DynamicActivationInt4WeightConfig"),
    "prototype.dtypes.uintx.gemlite_layout": ("0.15 and 0.16", "UIntXWeightOnlyConfig: kernels are chosen from the table"),
    "prototype.dtypes.uintx.marlin_qqq_tensor": ("0.15", "Int8DynamicActivationInt4WeightConfig"),
    "prototype.dtypes.uintx.to_marlinqqq_quantized_intx": ("0.15", "Int8DynamicActivationInt4WeightConfig"),
    "prototype.dtypes.uintx.uintx_layout": ("0.15 and 0.16", "UIntXWeightOnlyConfig"),
    "prototype.int4_opaque_tensor": ("0.15 and 0.16", "Int4WeightOnlyConfig"),
    "prototype.quantization.dynamic_activation_lut": ("0.13", "Int8DynamicActivationIntxWeightConfig"),
    "prototype.quantization.int4.Int4WeightOnlyOpaqueTensorConfig": ("0.17", "Int4WeightOnlyConfig"),
    "prototype.quantization.int4.inference_workflow.Int4WeightOnlyOpaqueTensorConfig": ("0.17", "Int4WeightOnlyConfig"),
    "prototype.scaled_grouped_mm": ("0.11", "pennyweight.training.grouped_mm"),
    "quantization.Int4MarlinSparseTensor": ("0.13 to 0.15", _SPARSE),
    "quantization.IntxUnpackedTensor": ("0.13", "IntxUnpackedToInt8Tensor"),
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
    "prototype.quantization.codebook_groupwise": "GroupwiseLutWeightConfig; embeddings with tables, CodebookWeightOnlyConfig of codebook_coreml",
    "prototype.autoround.utils": "transformers' own functions, and your own batches",
    "dtypes": f"{_GPU}to_affine_quantized_intx with PlainLayout()",
    "dtypes.floatx": f"{_GPU}FPXWeightOnlyConfig",
    "dtypes.floatx.float8_layout": "Float8Tensor; scales have an axis for each of the tensor's",
    "dtypes.floatx.floatx_tensor_core_layout": f"{_GPU}FPXWeightOnlyConfig",
    "dtypes.nf4tensor": _HANDLER,
    "dtypes.uintx": f"{_GPU}Int8DynamicActivationInt4WeightConfig",
    "dtypes.uintx.bitpacking": "pack and unpack",
    "dtypes.uintx.block_sparse_layout": _SPARSE,
    "dtypes.uintx.dyn_int8_act_int4_wei_cpu_layout": "Int8DynamicActivationInt4WeightConfig",
    "dtypes.uintx.int4_xpu_layout": f"{_GPU}Int4CPULayout()",
    "dtypes.uintx.marlin_sparse_layout": _SPARSE,
    "dtypes.uintx.packed_linear_int8_dynamic_activation_intx_weight_layout": "Int8DynamicActivationIntxWeightConfig, whose weights are packed for the processor at hand",
    "dtypes.uintx.semi_sparse_layout": _SPARSE,
    "dtypes.uintx.uint4_layout": "UIntXWeightOnlyConfig(torch.uint4)",
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
    "prototype.dtypes.uintx.bitpacking": "pack and unpack",
    "prototype.mx_formats": "MXDynamicActivationMXWeightConfig or NVFP4WeightOnlyConfig; to train, pennyweight.training.MXTrainingConfig",
    "prototype.mx_formats.config": "MXDynamicActivationMXWeightConfig; to train, pennyweight.training.MXTrainingConfig",
    "prototype.mx_formats.inference_workflow": "MXDynamicActivationMXWeightConfig or NVFP4WeightOnlyConfig",
    "prototype.mx_formats.mx_tensor": "MXTensor.to_mx and its dequantize()",
    "prototype.mx_formats.nvfp4_tensor": "NVFP4WeightOnlyConfig",
    "prototype.quantization": "UIntXWeightOnlyConfig; Int8DynamicActivationIntxWeightConfig",
    "prototype.quantization.quant_api": "UIntXWeightOnlyConfig; Float8StaticActivationFloat8WeightConfig",
    "quantization.prototype.qat": _QAT_LAYER,
    "quantization.prototype.qat.embedding": _QAT_LAYER,
    "quantization.prototype.qat.linear": _QAT_LAYER,
    "quantization.qat": _QAT_LAYER,
    "quantization.qat.embedding": _QAT_LAYER,
    "quantization.qat.linear": _QAT_LAYER,
    "quantization.quant_api": "register_quantize_module_handler",
    "quantization.quantize_": "Int4Tensor",
    "quantization.quantize_.workflows.nf4.nf4_tensor": _HANDLER,
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
