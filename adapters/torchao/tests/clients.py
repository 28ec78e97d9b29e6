"""What named clients import from torchao: the list of names that the adapter serves.

Read from the sources of the clients' releases of 2025 and 2026. Names that a client tries first and does without if
they are absent are left out. transformers, diffusers, PEFT and accelerate are installed with the tests, and their
sources are read by test_names.py.
"""

from __future__ import annotations

# client -> module of torchao -> names
IMPORTS: dict[str, dict[str, str]] = {
    "torchtune": {
        "dtypes": "TensorCoreTiledLayout",
        "dtypes.nf4tensor": "NF4Tensor linear_nf4 to_nf4",
        "float8": "Float8LinearConfig convert_to_float8_training precompute_float8_dynamic_scale_for_fsdp",
        "float8.float8_tensor_parallel": "Float8ColwiseParallel Float8RowwiseParallel PrepareFloat8ModuleInput",
        "prototype.low_bit_optim": "CPUOffloadOptimizer",
        "prototype.quantized_training": "Int8MixedPrecisionTrainingConfig int8_mixed_precision_training",
        "quantization": "int4_weight_only int8_dynamic_activation_int4_weight quantize_",
        "quantization.prototype.qat": "Int4WeightOnlyQATQuantizer Int8DynActInt4WeightQATQuantizer "
        "disable_4w_fake_quant disable_8da4w_fake_quant enable_4w_fake_quant enable_8da4w_fake_quant",
        "quantization.qat": "Int4WeightOnlyQATQuantizer Int8DynActInt4WeightQATQuantizer",
        "quantization.qat.linear": "FakeQuantizedLinear disable_4w_fake_quant disable_8da4w_fake_quant "
        "enable_4w_fake_quant enable_8da4w_fake_quant",
    },
    "ExecuTorch": {
        "prototype.quantization.embedding.api": "EmbeddingQuantizer TiedEmbeddingQuantizer",
        "prototype.spinquant": "apply_spinquant",
        "quantization.GPTQ": "Int8DynActInt4WeightLinear",
        "quantization.granularity": "PerAxis PerGroup",
        "quantization.quant_api": "Int8DynActInt4WeightQuantizer Int8DynamicActivationIntxWeightConfig "
        "IntxWeightOnlyConfig MappingType _replace_with_custom_fn_if_matches_filter quantize_",
        "quantization.pt2e": "FakeQuantize FusedMovingAvgObsFakeQuantize HistogramObserver MinMaxObserver "
        "MovingAverageMinMaxObserver MovingAveragePerChannelMinMaxObserver ObserverOrFakeQuantize "
        "ObserverOrFakeQuantizeConstructor PerChannelMinMaxObserver PlaceholderObserver "
        "UniformQuantizationObserverBase move_exported_model_to_eval move_exported_model_to_train",
        "quantization.pt2e.quantize_pt2e": "convert_pt2e prepare_pt2e prepare_qat_pt2e",
        "quantization.pt2e.quantizer": "ComposableQuantizer DerivedQuantizationSpec FixedQParamsQuantizationSpec "
        "QuantizationAnnotation QuantizationConfig QuantizationSpec Quantizer SharedQuantizationSpec "
        "annotate_input_qspec_map annotate_output_qspec get_input_act_qspec get_output_act_qspec get_weight_qspec",
        "quantization.utils": "per_token_dynamic_quant",
        "utils": "unwrap_tensor_subclass",
    },
    "torchtitan": {
        "float8": "Float8LinearConfig convert_to_float8_training precompute_float8_dynamic_scale_for_fsdp",
        "float8.float8_tensor_parallel": "Float8ColwiseParallel Float8RowwiseParallel PrepareFloat8ModuleInput",
        "prototype.moe_training.config": "Float8TrainingOpConfig MXFP8TrainingOpConfig MXFP8TrainingRecipe",
        "prototype.moe_training.conversion_utils": "MoEScalingType MoETrainingConfig",
        "prototype.mx_formats": "MXLinearConfig",
        "prototype.mx_formats.config": "MXFP8Dim1CastKernelChoice MXLinearConfig",
        "quantization.quant_api": "quantize_",
    },
    "axolotl": {
        "core.config": "AOBaseConfig",
        "optim": "AdamW4bit AdamW8bit AdamWFp8",
        "optim.adam": "_AdamBase single_param_adam",
        "optim.quant_utils": "_fp32_to_bf16_sr",
        "optim.subclass_8bit": "OptimState8bit",
        "prototype.mx_formats": "MXDynamicActivationMXWeightConfig NVFP4WeightOnlyConfig",
        "prototype.qat": "MXFakeQuantizeConfig",
        "quantization": "quantize_",
        "quantization.granularity": "PerGroup",
        "quantization.qat": "QATConfig",
        "quantization.qat.fake_quantize_config": "Float8FakeQuantizeConfig Int4WeightFakeQuantizeConfig "
        "IntxFakeQuantizeConfig",
        "quantization.quant_api": "Float8DynamicActivationFloat8WeightConfig Float8DynamicActivationInt4WeightConfig "
        "Int4WeightOnlyConfig Int8DynamicActivationIntxWeightConfig",
    },
    "Unsloth": {
        "core.config": "AOBaseConfig",
        "quantization": "Float8DynamicActivationFloat8WeightConfig Float8DynamicActivationInt4WeightConfig "
        "Int4WeightOnlyConfig Int8DynamicActivationIntxWeightConfig IntxWeightOnlyConfig ModuleFqnToConfig PerRow "
        "quantize_",
        "quantization.granularity": "PerAxis PerGroup",
        "quantization.qat": "QATConfig",
        "quantization.quant_api": "Int8DynamicActivationIntxWeightConfig",
    },
    "vLLM": {
        "core.config": "config_from_dict",
        "prototype.tensor_conversion.api": "convert_to_packed_tensor_based_on_current_hardware",
        "quantization": "FqnToConfig ModuleFqnToConfig fqn_matches_fqn_config quantize_",
        "quantization.quant_api": "quantize_",
        "utils": "TorchAOBaseTensor torch_version_at_least",
    },
    "README and tutorials of torchao": {
        "": "quantize_",
        "core.config": "AOBaseConfig config_from_dict config_to_dict",
        "dtypes": "AffineQuantizedTensor Float8Layout PlainLayout to_affine_quantized_floatx "
        "to_affine_quantized_floatx_static to_affine_quantized_intx to_affine_quantized_intx_static to_nf4",
        "float8": "convert_to_float8_training",
        "kernel": "int_scaled_matmul safe_int_mm",
        "optim": "AdamW4bit AdamW8bit AdamWFp8 CPUOffloadOptimizer",
        "prototype.awq": "AWQConfig",
        "prototype.gptq": "GPTQConfig",
        "prototype.smoothquant": "SmoothQuantConfig",
        "quantization": "Float8DynamicActivationFloat8WeightConfig Float8WeightOnlyConfig Int4WeightOnlyConfig "
        "Int8DynamicActivationInt4WeightConfig Int8DynamicActivationInt8WeightConfig Int8WeightOnlyConfig "
        "LinearActivationQuantizedTensor float8_weight_only int8_weight_only to_linear_activation_quantized",
        "quantization.granularity": "PerAxis PerBlock PerGroup PerRow PerTensor PerToken",
        "quantization.observer": "AffineQuantizedMinMaxObserver",
        "quantization.pt2e.quantizer.x86_inductor_quantizer": "X86InductorQuantizer "
        "get_default_x86_inductor_quantization_config",
        "quantization.quant_api": "_replace_with_custom_fn_if_matches_filter",
        "quantization.quant_primitives": "MappingType ZeroPointDomain choose_qparams_affine dequantize_affine "
        "quantize_affine",
        "quantization.transform_module": "_QUANTIZE_CONFIG_HANDLER register_quantize_module_handler",
        "utils": "TorchAOBaseTensor benchmark_model get_model_size_in_bytes unwrap_tensor_subclass",
    },
}
