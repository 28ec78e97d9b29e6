"""Table of torchao names that are not served, with what to use instead.

Served is what named clients import: transformers, diffusers, PEFT, accelerate, vLLM, torchtune, ExecuTorch, torchtitan,
axolotl, Unsloth, and the tutorials and README of torchao 0.8 to 0.18 (``tests/torchao/clients.py``). The rest are
torchao's own prototypes, test rigs, benchmarks and kernels for one GPU.
"""
# ruff: noqa: E501 - rows of a table

from __future__ import annotations

_QAT = "quantize_ with pennyweight.QATConfig, which accepts every config"
_SPARSE = "pennyweight.sparsify_, which sets weights to zero; quantize_ keeps them at zero, and sparse weights are stored dense"
_SCRIPTS = "torchvision's reference scripts, from which it was taken"
_GPTQ = 'pennyweight.quantize_(model, config, calibration=batches, algorithm="gptq")'
_AWQ = 'AWQConfig, or pennyweight.quantize_(model, config, calibration=batches, algorithm="awq")'
_SMOOTH = (
    'SmoothQuantConfig with a step, or pennyweight.quantize_(model, config, calibration=batches, algorithm="smooth")'
)
_TRAIN = "quantize_ with a config of pennyweight.training: Float8TrainingConfig, Int8MixedPrecisionTrainingConfig, MXTrainingConfig"
_WEIGHTS = "quantize_ with Int8MixedPrecisionTrainingConfig, or with pennyweight.training.BitNetTrainingConfig or Int8WeightOnlyTrainingConfig"
_STATES = "pennyweight.core.formats: DYNAMIC8_FLOAT32, UDYNAMIC8, DYNAMIC4 and LINEAR4 are the tables of optimizer states; OptimState8bit reads states"
_BLOCKS = "pennyweight.training.grouped_mm or linear with recipe 'blockwise'; Float8WeightOnlyConfig(granularity=PerBlock(...)) for inference"
_ATTENTION = "F.scaled_dot_product_attention, in the dtype of its inputs; QuantizedCache stores keys and values in 8 bits or less"
_DELAYED = "scales are recomputed in each product, ScalingType.DYNAMIC: no history is kept or synchronized"
_GROUPED = "pennyweight.training.grouped_mm, which quantizes its operands itself and takes the rows of each expert"
_GPU = "F.linear with a quantized weight: it was a kernel for one GPU"
_AUTO = "pennyweight.recommend, which times the configs on your model, or pennyweight.search for bits per layer"
_PARQ = "pennyweight.optim.QuantOptimizer"
_PACKED = "a config of the same width; weights are packed for the processor that they are on"
_CODEBOOK = 'pennyweight.quantize_(model, config, algorithm="kmeans") with a learned table of 1 to 4 bits'
_OLD_WEIGHTS = "quantize_ with Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig or Int4WeightOnlyConfig"
_OBSERVED = "Int8StaticActivationInt8WeightConfig with pennyweight.quantize_(model, config, calibration=batches)"
_FAKE = "an observer or FakeQuantize of quantization.pt2e with the arguments that you need, by with_args; quantize_ with pennyweight.QATConfig learns scales"
_ROTATE = 'apply_spinquant, or pennyweight.quantize_(model, config, algorithm="rotate")'
_TESTS = "your own tests: it was a test rig of torchao"
_INTX = "IntxWeightOnlyConfig with torch.int1 to torch.int8"
_CODES = "the encode and decode of pennyweight.get_format('e2m1'), 'e2m3', 'e3m2' or 'e8m0'; MXTensor.to_mx and NVFP4Tensor.to_nvfp4 quantize on every device"
_SIZES = "MXTensor.to_mx, whose shape is that of the data"
_COMPARE = "pennyweight.compare, which measures the error of each layer"
_INTERPRET = "torch.fx.Interpreter, which runs a graph node by node; pennyweight.compare measures the error of each layer of a model"
_FPX = "FPXWeightOnlyConfig; pennyweight.get_format('e3m2') encodes and decodes"
_HQQ = 'IntxWeightOnlyConfig(intx_choose_qparams_algorithm="hqq_scale_only"), or pennyweight.quantize_(model, config, algorithm="hqq")'
_HANDLER = "call the operator on the tensor: it handled one operator inside"

# Path of a module, which stands for what is below it, too -> replacement.
MODULES: dict[str, str] = {
    "dtypes.affine_quantized_tensor_ops": "pennyweight.register_quantize_module_handler, or a kernel of your own in pennyweight's table",
    "dtypes.floatx.floatx_tensor_core_layout": _FPX,
    "dtypes.fbgemm_fp8_tensor": "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())",
    "dtypes.fbgemm_int4_tensor": "Int4WeightOnlyConfig",
    "dtypes.uintx.bitpacking": _PACKED,
    "dtypes.uintx.block_sparse_layout": _SPARSE,
    "dtypes.uintx.dyn_int8_act_int4_wei_cpu_layout": "Int8DynamicActivationInt4WeightConfig",
    "dtypes.uintx.gemlite_layout": "UIntXWeightOnlyConfig",
    "dtypes.uintx.int4_xpu_layout": "Int4WeightOnlyConfig",
    "dtypes.uintx.marlin_qqq_tensor": "Int8DynamicActivationInt4WeightConfig",
    "dtypes.uintx.marlin_sparse_layout": _SPARSE,
    "dtypes.uintx.semi_sparse_layout": _SPARSE,
    "dtypes.uintx.uint4_layout": "IntxWeightOnlyConfig(torch.int4)",
    "experimental": "the configs of torchao.quantization, which run everywhere",
    "float8": _TRAIN,
    "float8.inductor_utils": _DELAYED,
    "float8.roofline_utils": "a measurement, pennyweight doctor --bench",
    "float8.stateful_float8_linear": _DELAYED,
    "kernel": "torchao.kernel.intmm",
    "kernel.blockwise_quantization": _BLOCKS,
    "ops": "F.linear with a quantized weight: these operators are those of torchao's own kernels and their packings; torch.library registers yours",
    "prototype.attention": _ATTENTION,
    "prototype.autoround": 'pennyweight.quantize_(model, config, calibration=batches, algorithm="reconstruct")',
    "prototype.blockwise_fp8": _BLOCKS,
    "prototype.blockwise_fp8_inference": _BLOCKS,
    "prototype.blockwise_fp8_training": _BLOCKS,
    "prototype.common": "torch.profiler",
    "prototype.dora": "PEFT's LoraConfig(use_dora=True) over a quantized model",
    "prototype.dtypes": _INTX,
    "prototype.float8_opaque_tensor": "Float8DynamicActivationFloat8WeightConfig",
    "prototype.float8nocompile": _TRAIN,
    "prototype.fp8_sdpa_inference": _ATTENTION,
    "prototype.galore": "pennyweight.optim.AdamW8bit, or the galore_torch package",
    "prototype.gptq.gptq_example": _GPTQ,
    "prototype.custom_fp_utils": _FPX,
    "prototype.hqq": _HQQ,
    "prototype.inductor": "torch.compile: its graphs hold pennyweight's products as operators, so no pass has to find them; pennyweight.fuse_ joins layers",
    "prototype.moe_quant": "pennyweight.quantize_, which quantizes the weights of experts [E, N, K]",
    "prototype.moe_training": _GROUPED,
    "prototype.moe_training.mxfp8_linear": _TRAIN,
    "prototype.mx_formats.constants": "pennyweight.get_format",
    "prototype.mx_formats.custom_cast": _CODES,
    "prototype.mx_formats.fp_format_spec": "pennyweight.get_format",
    "prototype.mx_formats.kernels": _CODES,
    "prototype.mx_formats.mx_funcs": _HANDLER,
    "prototype.mx_formats.mx_ops": _HANDLER,
    "prototype.paretoq": _QAT,
    "prototype.parq": _PARQ,
    "prototype.pat": "pennyweight.optim.PruneOptimizer",
    "prototype.profiler": "torch.profiler",
    "prototype.quant_logger": _COMPARE,
    "prototype.quantization.autoquant_v2": _AUTO,
    "prototype.quantization.codebook": _CODEBOOK,
    "prototype.quantization.codebook_coreml": _CODEBOOK,
    "prototype.quantization.codebook_groupwise": _CODEBOOK,
    "prototype.quantization.codebook_utils": _CODEBOOK,
    "prototype.quantization.dynamic_activation_lut": "Int8DynamicActivationIntxWeightConfig",
    "prototype.quantization.float8_static_quant": "Float8StaticActivationFloat8WeightConfig",
    "prototype.quantization.gguf": "pennyweight convert MODEL FILE.gguf",
    "prototype.quantization.int8_lut_tensor": "Int8DynamicActivationIntxWeightConfig",
    "prototype.quantization.module_swap": "quantize_, which keeps the modules",
    "prototype.quantization.subgraph_utils": "pennyweight.recommend",
    "prototype.quantization.uintx": "UIntXWeightOnlyConfig",
    "prototype.quantized_training": _WEIGHTS,
    "prototype.scaled_grouped_mm": _GROUPED,
    "prototype.sparsity": _SPARSE,
    "prototype.spinquant": _ROTATE,
    "prototype.splitk": _GPU,
    "quantization.GPTQ_MT": _GPTQ,
    "quantization.autoquant": _AUTO,
    "quantization.dynamic_quant": _OLD_WEIGHTS,
    "quantization.linear_activation_scale": _SMOOTH,
    "quantization.linear_activation_weight_observed_tensor": _OBSERVED,
    "quantization.marlin_qqq": "Int8DynamicActivationInt4WeightConfig",
    "quantization.prototype.qat.affine_fake_quantized_tensor": _QAT,
    "quantization.pt2e._numeric_debugger": _INTERPRET,
    "quantization.pt2e.constant_fold": "torch._inductor.constant_folding",
    "quantization.pt2e.graph_utils": "torch.fx.passes.utils.source_matcher_utils.get_source_partitions",
    "quantization.pt2e.learnable_fake_quantize": _FAKE,
    "quantization.pt2e.quantizer.duplicate_dq_pass": "convert_pt2e, which copies dequantize for each user",
    "quantization.pt2e.quantizer.port_metadata_pass": "convert_pt2e, which ports the metadata of nodes",
    "quantization.pt2e.reference_representation_rewrite": "pennyweight.lower, which computes products of codes in integers",
    "quantization.pt2e.inductor_passes": "pennyweight.lower; torch.compile, whose own passes fuse quantized layers",
    "quantization.qat.affine_fake_quantized_tensor": _QAT,
    "quantization.quantize_.int4_groupwise_preshuffle_tensor": "Int4WeightOnlyConfig",
    "quantization.quantize_.workflows.int4.int4_marlin_sparse_tensor": _SPARSE,
    "quantization.quantize_.workflows.intx.intx_unpacked_tensor": "IntxUnpackedToInt8Tensor",
    "quantization.smoothquant": _SMOOTH,
    "quantization.subclass": _OLD_WEIGHTS,
    "quantization.weight_only": _OLD_WEIGHTS,
    "quantization.weight_tensor_linear_activation_quantization": _OBSERVED,
    "sparsity": _SPARSE,
    "sparsity.prototype.superblock.utils": _SCRIPTS,
    "swizzle": "nothing: it reordered weights for AMD GPUs",
    "testing": _TESTS,
}  # fmt: skip

# A name in any module, "module.name", or "module.*" for a module's other names -> replacement.
NAMES: dict[str, str] = {
    **dict.fromkeys(
        ["ALL_AUTOQUANT_CLASS_LIST", "DEFAULT_AUTOQUANT_CLASS_LIST", "DEFAULT_FLOAT_AUTOQUANT_CLASS_LIST", "DEFAULT_INT4_AUTOQUANT_CLASS_LIST", "DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST", "GEMLITE_INT4_AUTOQUANT_CLASS_LIST", "OTHER_AUTOQUANT_CLASS_LIST", "autoquant"],
        _AUTO,
    ),
    **dict.fromkeys(
        ["GPTQQuantizer", "Int4WeightOnlyGPTQQuantizer", "Int8DynActInt4WeightGPTQQuantizer", "MultiTensor", "MultiTensorInputRecorder", "StateDictManager", "GenericGPTQRunner"],
        _GPTQ,
    ),
    **dict.fromkeys(["AWQUIntXConfig", "awq_uintx", "insert_awq_observer_"], _AWQ),
    **dict.fromkeys(
        ["SmoothFakeDynQuantMixin", "SmoothFakeDynamicallyQuantizedLinear", "get_scale", "insert_smooth_quant_observer_", "load_smooth_quant_recipe", "save_smooth_quant_recipe", "set_smooth_fq_attribute", "smooth_fq_linear_to_inference", "smooth_quant", "swap_linear_with_smooth_fq_linear", "to_weight_tensor_with_linear_activation_scale_metadata"],
        _SMOOTH,
    ),
    **dict.fromkeys(
        ["WeightOnlyInt8QuantLinear", "DynamicallyPerAxisQuantizedLinear", "change_linear_weights_to_int8_dqtensors", "change_linear_weights_to_int8_woqtensors", "change_linear_weights_to_int4_woqtensors", "Int8DynamicallyQuantizedLinearWeight", "Int8WeightOnlyQuantizedLinearWeight", "Int4WeightOnlyQuantizedLinearWeight", "QuantizedLinearWeightBase"],
        _OLD_WEIGHTS,
    ),
    **dict.fromkeys(["insert_observers_", "LinearActivationWeightObservedTensor"], _OBSERVED),
    **dict.fromkeys(
        ["apply_fake_sparsity", "semi_sparse_weight", "semi_structured_sparsify", "sparsify_", "int8_dynamic_activation_int8_semi_sparse_weight"],
        _SPARSE,
    ),
    **dict.fromkeys(["MarlinQQQTensor", "to_marlinqqq_quantized_intx"], "Int8DynamicActivationInt4WeightConfig"),
    **dict.fromkeys(["FbgemmConfig", "FbgemmInt4Tensor", "to_fbgemm_int4", "Int4GroupwisePreshuffleTensor"], "Int4WeightOnlyConfig"),
    **dict.fromkeys(["FbgemmFp8Tensor", "to_fbgemm_fp8"], "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())"),
    **dict.fromkeys(
        ["PackedLinearInt8DynamicActivationIntxWeightAQTTensorImpl", "Target", "make_packed_linear_int8_dynamic_activation_intx_weight_tensor", "target_from_str", "target_to_str", "to_affine_quantized_packed_linear_int8_dynamic_activation_intx_weight"],
        "Int8DynamicActivationIntxWeightConfig",
    ),
    **dict.fromkeys(
        ["FloatxTensorCoreLayout", "from_scaled_tc_floatx", "to_affine_quantized_fpx", "to_scaled_tc_floatx"],
        _FPX,
    ),
    **dict.fromkeys(["abs_lsh", "abs_rsh", "DummyModule", "get_out_shape", "profiler_runner", "_apply_logging_hook"], "a line of your own"),
    **dict.fromkeys(["skip_if_compute_capability_less_than", "skip_if_no_cuda", "skip_if_rocm", "skip_if_xpu"], "unittest.skipIf, pytest.mark.skipif"),
    "_UnwrapAffineFakeQuantizedTensor": _QAT,
    "Int4MarlinSparseTensor": _SPARSE,
    "IntxUnpackedTensor": "IntxUnpackedToInt8Tensor",
    "Int4WeightOnlyOpaqueTensorConfig": "Int4WeightOnlyConfig",
    "dtypes.floatx.float8_layout.*": "Float8Tensor; scales have an axis for each of the tensor's",
    **dict.fromkeys(
        [f"float8{end}.*" for end in ("", ".config", ".float8_linear_utils")], _DELAYED
    ),
    "float8.float8_utils.*": _TRAIN,
    "float8.fsdp_utils.*": "fully_shard(model), which gathers weights in their own dtype",
    "kernel.*": _GPU,
    **dict.fromkeys(["FromMXConstrFunc", "ToMXConstrFunc"], "MXTensor.to_mx and dequantize; pennyweight.QATConfig trains"),
    **dict.fromkeys(
        ["tensor_size_fp4x2_to_hp", "tensor_size_fp6x4_to_hpx3", "tensor_size_hp_to_fp4x2", "tensor_size_hpx3_to_fp6x4"], _SIZES
    ),
    "maybe_dtensor_to_blocked": "to_blocked(t.full_tensor())",
    "experimental.quant_api.*": "the configs of torchao.quantization, which run everywhere",
    "prototype.dtypes.*": _INTX,
    **dict.fromkeys(
        ["_quant_int8_dynamic_per_token_linear", "_quant_int8_per_token_matmul", "_quantize_activation_per_token_absmax", "quant_int8_dynamic_per_token_linear", "quant_int8_per_token_matmul", "quantize_activation_per_token_absmax"],
        "F.linear with a weight of Int8DynamicActivationInt8WeightConfig",
    ),
    **dict.fromkeys(["dequantize_per_channel", "dequantize_per_tensor"], "dequantize_affine"),
    **dict.fromkeys(["_PartialWrapper", "_with_args"], "with_args of the observer"),
    "prototype.moe_training.*": _GROUPED,
    **dict.fromkeys(["dtypes.nf4tensor.*", "quantization.quantize_.workflows.nf4.nf4_tensor.*"], _HANDLER),
    **dict.fromkeys(["dtypes.utils.*", "utils.*"], "torch.cuda, torch.cpu or importlib.metadata, which it asked; torch.library for operators"),
    "benchmark_torch_function_in_microseconds": "torch.utils.benchmark.Timer",
    "float8.float8_linear.*": "Float8Linear, or pennyweight.training.linear with recipe 'tensorwise' or 'rowwise'",
    "float8.inference.*": "F.linear with a float8 weight",
    **dict.fromkeys(["MXInferenceLinear", "MXInferenceLinearConfig"], "pennyweight.MXWeightOnlyConfig"),
    "NVFP4ObservedLinear": "NVFP4DynamicActivationNVFP4WeightConfig(act_scale=...), the largest input / (6 * 448)",
    "RunningAbsMaxSmoothQuantObserver": "SmoothQuantObserver, which finds the same factors",
    "prototype.mx_formats.mx_linear.*": "quantize_ with MXLinearConfig, or pennyweight.training.linear with a Recipe",
    **dict.fromkeys(
        ["prototype.quantized_training.*", "prototype.quantized_training.int8_mixed_precision.*"], _WEIGHTS
    ),
    "prototype.spinquant.spinquant.*": _ROTATE,
    **dict.fromkeys(["_choose_qparams_and_quantize_affine_hqq", "_choose_qparams_and_quantize_scale_only_hqq", "_choose_qparams_and_quantize_scale_only_sinq", "choose_qparams_and_quantize_affine_hqq"], _HQQ),
    **dict.fromkeys(
        ["_choose_qparams_and_quantize_affine_qqq", "_dequantize_affine_qqq", "choose_qparams_and_quantize_affine_qqq", "dequantize_affine_qqq"],
        "Int8DynamicActivationInt4WeightConfig",
    ),
    **dict.fromkeys(
        [f"{before}{name}_floatx" for before in ("", "_") for name in ("choose_qparams_affine", "quantize_affine", "dequantize_affine")], _FPX
    ),
    "AffineQuantizedFixedQParamObserver": "FixedQParamsObserver of quantization.pt2e",
    "AffineQuantizedMSEObserver": 'pennyweight.quantize_(model, config, algorithm="mse")',
    **dict.fromkeys(["optim.quant_utils.*", "prototype.low_bit_optim.quant_utils.*", "quantize_fp8"], _STATES),
    "Float8ActInt4WeightQATQuantizer": "QATConfig(Float8DynamicActivationInt4WeightConfig())",
    **dict.fromkeys(["_choose_qparams_gguf", "_dequantize_gguf", "_quantize_gguf"], "pennyweight convert MODEL FILE.gguf"),
    "prototype.mx_formats.mx_tensor.*": _HANDLER,
    "prototype.mx_formats.nvfp4_tensor.*": _HANDLER,
    "prototype.quantization.*": "UIntXWeightOnlyConfig; Int8DynamicActivationIntxWeightConfig",
    "prototype.quantization.quant_api.*": "UIntXWeightOnlyConfig; Float8StaticActivationFloat8WeightConfig",
    **dict.fromkeys(
        [f"quantization.pt2e{end}.*" for end in ("", "._affine_quantization", ".fake_quantize", ".observer")], _FAKE
    ),
    **dict.fromkeys(["quantization.pt2e.convert.*", "quantization.pt2e.quantizer.*"], "convert_pt2e"),
    **dict.fromkeys(["quantization.pt2e.export_utils.*", "quantization.pt2e.utils.*"], "torch.export and torch.fx: it was a helper of torchao's passes"),
    **dict.fromkeys(
        ["CUSTOM_KEY", "FROM_NODE_KEY", "NUMERIC_DEBUG_HANDLE_KEY", "NodeAccuracySummary", "OutputLogger", "QuantizationComparisonResult", "compare_results", "extract_results_from_loggers", "generate_numeric_debug_handle", "prepare_for_propagation_comparison"],
        _INTERPRET,
    ),
    "bfs_trace_with_node_process": "a loop over the nodes of a graph",
    "OperatorPatternType": "list[Callable[..., Any]]",
    "get_x86_inductor_linear_dynamic_fp16_config": "get_default_x86_inductor_quantization_config",
    "quantization.quant_api.*": "register_quantize_module_handler",
    "quantization.GPTQ.*": "Int8DynActInt4WeightQuantizer or Int4WeightOnlyQuantizer, or quantize_ with a config",
}  # fmt: skip


def why_missing(module: str, name: str | None) -> str | None:
    """The message about a missing module (``name`` None) or a name in a served one; None if there is none.

    A module is looked up by its path and its parents', a name by its path, then alone, then by its module.
    """
    if name is None:
        parts = module.split(".")
        found = [MODULES.get(".".join(parts[:end])) for end in range(len(parts), 0, -1)]
    else:
        path = f"{module}.{name}".lstrip(".")  # of a name, or of a submodule that its package is asked for
        found = [NAMES.get(path), MODULES.get(path), NAMES.get(name), NAMES.get(f"{module}.*")]
    instead = next((text for text in found if text), None)
    return instead and f"torchao has or had it, pennyweight does not serve it; use instead: {instead}"
