"""Table of torchao names that are missing here: the releases that had them, and replacements."""
# ruff: noqa: E501 - rows of a table

from __future__ import annotations

_QAT = "quantize_ with pennyweight.QATConfig, which accepts every config"
_SPARSE = "sparse weights are stored dense: pennyweight.sparsify_ sets weights to zero, which quantize_ keeps at zero"
_SCRIPTS = "torchvision's reference scripts, from which it was taken"
_LLAMA = "transformers' Llama with torchao.prototype.paretoq.models.utils_quant.QuantizeLinear as its linear layers"
_GPTQ = 'pennyweight.quantize_(model, config, calibration=batches, algorithm="gptq")'
_TRAIN = "quantize_ with a config of pennyweight.training: Float8TrainingConfig, Int8MixedPrecisionTrainingConfig, MXTrainingConfig"
_ATTENTION = "F.scaled_dot_product_attention, in the dtype of its inputs; pennyweight.inference.kv_cache.QuantizedCache stores keys and values in 8 bits or less"
_DELAYED = "scales are recomputed in each product, ScalingType.DYNAMIC: no history is kept or synchronized"
_GPU = "packs for one GPU; "
_HANDLER = "handled one operator inside; call that operator on the tensor"

# Path of a module or of a name in it -> (releases of torchao that had it, from their wheels; replacement).
GONE: dict[str, tuple[str, str]] = {
    "float8": ("0.4 on", _TRAIN),
    "float8.inductor_utils": ("0.9", _DELAYED),
    "float8.roofline_utils": ("0.4 to 0.11", "a measurement, pennyweight doctor --bench"),
    "float8.stateful_float8_linear": ("0.9", _DELAYED),
    "kernel": ("0.1 on", "torchao.kernel.intmm"),
    "prototype.attention": ("0.17 on", _ATTENTION),
    "prototype.autoround.autoround_llm": ("0.5 on", "prepare_model_for_applying_auto_round_ with your own batches"),
    "prototype.autoround.eval_autoround": ("0.5 on", "prepare_model_for_applying_auto_round_, then pennyweight.compare"),
    "prototype.blockwise_fp8_training": ("0.13 on", "Float8BlockwiseLinearConfig, or pennyweight.training.grouped_mm with recipe 'blockwise'"),
    "prototype.common": ("0.2 on", "torch.profiler"),
    "prototype.dora.dora_profile": ("0.2 to 0.9", "torch.profiler, and the layers of torchao.prototype.dora.dora_layer"),
    "prototype.dora.kernels": ("0.2 to 0.9", "the layers of torchao.prototype.dora.dora_layer: these were GPU kernels"),
    "prototype.float8nocompile": ("0.8 on", "nothing: these are its own tests; the layers are in float8nocompile_linear"),
    "prototype.fp8_sdpa_inference": ("0.16 on", _ATTENTION),
    "prototype.galore.kernels": ("0.2 to 0.11", "torchao.prototype.galore.optim.galore_torch.AdamW: these were GPU kernels"),
    "prototype.inductor": ("0.12 on", "nothing: compiled graphs hold pennyweight's products as operators, so no pass has to find them; pennyweight.fuse_ joins layers"),
    "prototype.paretoq.models.configuration_llama": ("0.11 on", _LLAMA),
    "prototype.paretoq.models.modeling_llama_quant": ("0.11 on", _LLAMA),
    "prototype.paretoq.train": ("0.11 on", _LLAMA),
    "prototype.mx_formats.mx_funcs": ("0.12 on", f"nothing: it {_HANDLER}"),
    "prototype.mx_formats.mx_ops": ("0.3 to 0.12", f"nothing: each {_HANDLER}"),
    "prototype.profiler": ("0.8 and 0.9", "torch.profiler"),
    "prototype.quantization.codebook_groupwise.codebook_quantized_tensor": ("0.13 on", "GroupwiseLutWeightConfig: it was packed for ARM processors"),
    "prototype.quantization.subgraph_utils": ("0.8 to 0.16", "pennyweight.recommend"),
    "prototype.splitk": ("0.4 to 0.9", "nothing: it was a GPU kernel"),
    "testing.training.roofline_utils": ("0.12 on", "a measurement: pennyweight doctor --bench"),
    "experimental": ("0.7 on", "the configs of torchao.quantization, which run everywhere"),
    "prototype.gptq.gptq_example": ("0.16 on", _GPTQ),
    "quantization.GPTQ.GenericGPTQRunner": ("0.3 to 0.11", _GPTQ),
    "prototype.hqq.hqq_tinygemm_linear": ("0.2 on", 'pennyweight.quantize_(model, config, algorithm="hqq"); the formulas are in torchao.quantization.quant_primitives'),
    "prototype.hqq.kernels": ("0.2 on", "F.linear with a quantized weight: they were GPU kernels"),
    "prototype.hqq.mixed_mm.triton_mixed_mm": ("0.2 on", "F.linear with a quantized weight: it was a GPU kernel"),
    "prototype.hqq.triton_mixed_mm": ("0.2 on", "F.linear with a quantized weight: it was a GPU kernel"),
    "prototype.moe_quant.llama4_quant": ("0.11 to 0.15", "MoEQuantConfig; it was a script that loads a model when imported"),
    "prototype.moe_training": ("0.12 on", "pennyweight.training.grouped_mm, which runs on every device and takes the rows of each expert"),
    "prototype.pat": ("0.17 on", "pennyweight.optim.PruneOptimizer"),
    "prototype.quantization.module_swap": ("0.10 on", "quantize_, which keeps the modules"),
    "prototype.quantized_training": ("0.5 on", _TRAIN),
    "quantization.pt2e.inductor_passes": ("0.11 on", "pennyweight.lower; torch.compile, whose own passes fuse quantized layers"),
    "prototype.sparsity.activation": ("0.10 to 0.15", "torch.nn.functional.relu(x) ** 2 and pennyweight.quantize_: its kernel was for one GPU"),
    "prototype.sparsity.superblock": ("0.7 to 0.9", _SCRIPTS),
    "prototype.spinquant._hadamard_matrices.get_had156": ("0.7 on", "get_hadK(156 * 2**n) with n >= 1"),
    "prototype.spinquant._hadamard_matrices.get_had172": ("0.7 on", "get_hadK(172 * 2**n), which uses a larger matrix"),
    "prototype.spinquant._hadamard_matrices.get_had52": ("0.7 on", "get_hadK(52 * 2**n) with n >= 1"),
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
    "sparsity.marlin.utils": ("0.7 to 0.15", f"{_GPU}Int4WeightOnlyConfig(layout=MarlinSparseLayout())"),
    "sparsity.prototype.superblock.utils": ("0.7 to 0.9", _SCRIPTS),
    "swizzle": ("0.12 on", "nothing: it reordered weights for AMD GPUs"),
}  # fmt: skip

# Path of a module -> replacement for its missing names.
BESIDES: dict[str, str] = {
    "prototype.quantization.codebook_groupwise": "GroupwiseLutWeightConfig; embeddings with tables, CodebookWeightOnlyConfig of codebook_coreml",
    "prototype.autoround.utils": "transformers' own functions, and your own batches",
    "dtypes.floatx.float8_layout": "Float8Tensor; scales have an axis for each of the tensor's",
    "experimental.quant_api": "the configs of torchao.quantization, which run everywhere",
    "prototype.quantized_training.int8_mm": "scaled_int8_mm, which runs on every device",
    **dict.fromkeys(
        [f"float8{end}" for end in ("", ".config", ".float8_linear_utils", ".float8_scaling_utils", ".float8_utils")],
        _DELAYED,
    ),
    "float8.fsdp_utils": "fully_shard(model), which gathers weights in their own dtype",
    "kernel": _SPARSE,
    "ops": "F.linear with a quantized weight: these operators are those of torchao's own kernels and their packings",
    "quantization.pt2e.convert": "convert_pt2e",
    "testing.pt2e.utils": "a graph of convert_pt2e; float8 operators of torchao are not in graphs",
    "prototype.dtypes": "IntxWeightOnlyConfig(torch.int2)",
    **dict.fromkeys(
        [f"prototype.moe_training{end}" for end in (".kernels", ".kernels.mxfp8", ".kernels.mxfp8.quant", ".utils")],
        "pennyweight.training.grouped_mm, which quantizes its operands itself; the others were kernels for a GPU",
    ),
    "prototype.blockwise_fp8_training.kernels": "the torch_ functions here, or Float8BlockwiseLinear; the others were kernels for a GPU",
    "prototype.blockwise_fp8.blockwise_quantization": "the functions here without _kernel, which run on every device",
    "prototype.float8nocompile.kernels.fp8_dynamic_tensorwise": "hp_to_fp8_col_major_t",
    "prototype.moe_training.nvfp4_training.hadamard_utils": "nothing: products are not captured in CUDA graphs",
    "prototype.moe_training.nvfp4_training.nvfp4_linear": "nvfp4_linear",
    "prototype.mx_formats.mx_tensor": _HANDLER,
    "prototype.mx_formats.nvfp4_tensor": _HANDLER,
    "prototype.quantization": "UIntXWeightOnlyConfig; Int8DynamicActivationIntxWeightConfig",
    "prototype.quantization.quant_api": "UIntXWeightOnlyConfig; Float8StaticActivationFloat8WeightConfig",
    "prototype.galore.optim.galore_torch": "AdamW of the same module, or pennyweight.optim.AdamW8bit without projection",
    "sparsity.blocksparse": _HANDLER,
    "sparsity.marlin": f"{_GPU}Int4WeightOnlyConfig(layout=MarlinSparseLayout())",
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
