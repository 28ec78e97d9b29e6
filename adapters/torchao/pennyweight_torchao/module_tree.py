"""The module tree of torchao for all releases from 0.8 to 0.18: which of our files has the names of each module.

A module exposes all names of its files, so it has the names of all releases at once: more than any single release.
"""

from __future__ import annotations

__all__ = ["REEXPORTS", "TREE"]

# Names of pennyweight that are torchao's too and need no adapter: "@name" in the tree -> module, names.
REEXPORTS: dict[str, tuple[str, str]] = {
    "@configs": (
        "pennyweight.planning.configs",
        "AOBaseConfig FPXWeightOnlyConfig Float8DynamicActivationFloat8WeightConfig "
        "Float8DynamicActivationInt4WeightConfig Float8StaticActivationFloat8WeightConfig Float8WeightOnlyConfig "
        "FqnToConfig Int8StaticActivationInt8WeightConfig Int8WeightOnlyConfig MXDynamicActivationMXWeightConfig "
        "NF4WeightOnlyConfig NVFP4WeightOnlyConfig UIntXWeightOnlyConfig",
    ),
    "@integer_aliases": ("pennyweight.planning.configs.integer", "int8_weight_only uintx_weight_only"),
    "@float_aliases": (
        "pennyweight.planning.configs.floating",
        "float8_dynamic_activation_float8_weight float8_static_activation_float8_weight float8_weight_only "
        "fpx_weight_only",
    ),
    "@granularity": (
        "pennyweight.planning.granularity",
        "Granularity MappingType PerAxis PerBlock PerGroup PerRow PerTensor PerToken",
    ),
    "@compute_error": ("pennyweight_torchao.groupwise", "compute_error"),
    "@optim": (
        "pennyweight.optim",
        "CPUOffloadOptimizer",
    ),
    "@safetensors": (
        "pennyweight.io.codecs.torchao.flattened_safetensors",
        "ALLOWED_CLASSES ALLOWED_TENSORS_SUBCLASSES TensorSubclassAttributeJSONEncoder flatten_tensor_state_dict "
        "is_metadata_torchao object_from_dict unflatten_tensor_state_dict",
    ),
    "@graph_specs": (
        "pennyweight_torchao.graph_mode.specs",
        "ComposableQuantizer DerivedQuantizationSpec EdgeOrNode FixedQParamsQuantizationSpec QuantizationAnnotation "
        "QuantizationConfig QuantizationSpec QuantizationSpecBase Quantizer SharedQuantizationSpec",
    ),
    "@graph_annotate": (
        "pennyweight_torchao.graph_mode.annotate",
        "annotate_input_qspec_map annotate_output_qspec get_bias_qspec get_input_act_qspec get_module_name_filter "
        "get_output_act_qspec get_weight_qspec is_valid_annotation",
    ),
    "@graph_observer_base": (
        "pennyweight_torchao.graph_mode.observer_base",
        "ObserverBase PartialWrapper UniformQuantizationObserverBase",
    ),
    "@graph_range_observers": (
        "pennyweight_torchao.graph_mode.range_observers",
        "MinMaxObserver MovingAverageMinMaxObserver MovingAveragePerChannelMinMaxObserver PerChannelMinMaxObserver",
    ),
    "@graph_histogram": ("pennyweight_torchao.graph_mode.histogram_observer", "HistogramObserver"),
    "@graph_passive_observers": (
        "pennyweight_torchao.graph_mode.passive_observers",
        "DerivedObserverOrFakeQuantize FixedQParamsObserver PlaceholderObserver",
    ),
    "@graph_fake_quantize": (
        "pennyweight_torchao.graph_mode.fake_quantize",
        "FakeQuantize FakeQuantizeBase FixedQParamsFakeQuantize FusedMovingAvgObsFakeQuantize disable_fake_quant "
        "disable_observer enable_fake_quant enable_observer",
    ),
    "@graph_code_range": (
        "pennyweight_torchao.graph_mode.code_range",
        "calculate_qmin_qmax check_min_max_valid is_per_channel is_per_tensor to_underlying_dtype validate_qmin_qmax",
    ),
    "@graph_train_eval": (
        "pennyweight_torchao.graph_mode.train_eval",
        "allow_exported_model_train_eval move_exported_model_to_eval move_exported_model_to_train",
    ),
    "@graph_x86": (
        "pennyweight_torchao.graph_mode.inductor_quantizers",
        "X86InductorQuantizer",
    ),
    "@graph_inductor": (
        "pennyweight_torchao.graph_mode.inductor_configs",
        "ArmInductorQuantizer XPUInductorQuantizer get_default_arm_inductor_quantization_config "
        "get_default_x86_inductor_quantization_config get_default_xpu_inductor_quantization_config",
    ),
    "@graph_embedding": (
        "pennyweight_torchao.graph_mode.embedding_quantizer",
        "EmbeddingQuantizer get_embedding_operators_config",
    ),
    "@graph_xnnpack": (
        "pennyweight_torchao.graph_mode.xnnpack_quantizer",
        "OperatorConfig XNNPACKQuantizer get_symmetric_quantization_config",
    ),
    "@graph_annotators": (
        "pennyweight_torchao.graph_mode.xnnpack_annotators",
        "OP_TO_ANNOTATOR propagate_annotation register_annotator",
    ),
}

_CONFIGS = "v0_8_configs configs.float8 configs.granularity @configs @integer_aliases @float_aliases"
_PRIMITIVES = "primitives format_primitives qparams enums"
_MX_TENSORS = "mx.mx_tensor mx.nvfp4_tensor"
_NF4 = "nf4.tensor nf4.linear"
_TENSORS = f"int8_float8_views int4_views {_NF4} {_MX_TENSORS}"
_NF4_MODULE = f"{_NF4} nf4.parts nf4.operators nf4.scalers"
_QUANT_API = f"quant_api {_CONFIGS} enums @granularity linear_modules {_TENSORS} v0_8_aqt v0_8_layouts groupwise"
_QAT_CONFIGS = "qat.configs qat.fake_quantize_configs"
_QAT = f"{_QAT_CONFIGS} qat.fake_quantizers qat.linear qat.embedding qat.quantizers qat.steps"
_OBSERVERS = (
    "@graph_observer_base @graph_range_observers @graph_histogram @graph_passive_observers pt2e.affine_observers "
    "@granularity enums"
)
_FAKE_QUANTIZE = "@graph_fake_quantize pt2e.affine_observers"
_PT2E = "quantization.pt2e"
_QUANTIZERS = "@graph_specs @graph_annotate pt2e.graph_names pt2e.graph_conversion @graph_xnnpack"
_MX = "attributes"  # whose import gives tensors torchao's attributes
_FLOAT8 = "float8_training.config float8_training.layers enums"

# Package of torchao, modules in it ("." is the package itself), files here with their names.
_ROWS = (
    ("", ".", "quant_api"),
    ("", "utils", "tools hardware base_tensor dispatch"),
    ("", "_executorch_ops", "operators.decomposed"),
    ("core", ".", ""),
    ("core", "config", "config_json"),
    ("dtypes", ".", f"v0_8_aqt v0_8_layouts {_TENSORS}"),
    ("dtypes", "affine_quantized_tensor", "v0_8_aqt v0_8_layouts enums"),
    ("dtypes", "nf4tensor", _NF4_MODULE),
    ("dtypes", "_nf4tensor_api", "nf4.config"),
    ("dtypes", "utils", "v0_8_layouts tools hardware"),
    ("dtypes.floatx", ". float8_layout", "v0_8_layouts"),
    (
        "dtypes.uintx",
        ". int4_cpu_layout packed_linear_int8_dynamic_activation_intx_weight_layout plain_layout "
        "q_dq_layout tensor_core_tiled_layout uintx_layout",
        "v0_8_layouts",
    ),
    ("experimental", ".", ""),
    ("experimental", "quant_api", "embedding_quantizers"),
    ("float8", ". config float8_linear float8_linear_utils fsdp_utils types", _FLOAT8),
    ("float8", "float8_tensor_parallel", "float8_training.tensor_parallel"),
    ("float8", "float8_utils", "@compute_error float8_training.config"),
    ("float8", "inference", "enums configs.granularity"),
    ("kernel", ". intmm", "int8_matmul"),
    ("optim", ". adam cpu_offload", "low_bit_optim.optimizers low_bit_optim.adam @optim"),
    ("optim", "quant_utils", "low_bit_optim.adam"),
    ("optim", "subclass_4bit", "low_bit_optim.state_4bit"),
    ("optim", "subclass_8bit", "low_bit_optim.state_8bit"),
    ("optim", "subclass_fp8", "low_bit_optim.state_fp8"),
    ("prototype", ".", ""),
    ("prototype", "_nf4tensor_api", "nf4.config"),
    ("prototype.awq", ". api core", "algorithms.awq"),
    ("prototype.dtypes", ".", "v0_8_layouts"),
    ("prototype.dtypes.uintx", ". uintx_layout", "v0_8_layouts"),
    ("prototype.low_bit_optim", ". adam cpu_offload", "low_bit_optim.optimizers low_bit_optim.adam @optim"),
    ("prototype.low_bit_optim", "quant_utils", "low_bit_optim.adam"),
    ("prototype.low_bit_optim", "subclass_4bit", "low_bit_optim.state_4bit"),
    ("prototype.low_bit_optim", "subclass_8bit", "low_bit_optim.state_8bit"),
    ("prototype.low_bit_optim", "subclass_fp8", "low_bit_optim.state_fp8"),
    ("prototype.gptq", ". api observer", "algorithms.gptq"),
    ("prototype.moe_training", ". conversion_utils tensor", "moe_training.weights moe_training.config"),
    ("prototype.moe_training", "config", "moe_training.config"),
    (
        "prototype.mx_formats",
        ". inference_workflow mx_subclass",
        f"{_MX} mx.inference mx.training {_CONFIGS} {_MX_TENSORS} enums",
    ),
    ("prototype.mx_formats", "config", f"{_MX} mx.checks mx.training enums"),
    ("prototype.mx_formats", "mx_linear", f"{_MX} mx.training"),
    ("prototype.mx_formats", "mx_tensor", f"{_MX} {_MX_TENSORS} mx.conversion mx.scale_layout enums"),
    ("prototype.mx_formats", "nvfp4_tensor", f"{_MX} {_MX_TENSORS} mx.conversion enums"),
    ("prototype.mx_formats", "utils", f"{_MX} mx.scale_layout mx.mx_tensor"),
    ("prototype.qat", ". mx nvfp4", f"{_MX} mx.fake_quantize"),
    ("prototype.quantization", ". quant_api", _CONFIGS),
    ("prototype.quantization.embedding", ". api", "embedding_quantizers"),
    ("prototype.quantization.int4", ".", f"{_CONFIGS} int8_float8_views int4_views"),
    ("prototype.quantization.int4", "inference_workflow", _CONFIGS),
    ("prototype.quantization.int4", "int4_opaque_tensor", "int8_float8_views int4_views"),
    ("prototype.quantized_training", ". int8_mixed_precision", "int8_training"),
    ("prototype.safetensors", ".", ""),
    ("prototype.safetensors", "safetensors_support safetensors_utils", "@safetensors"),
    ("prototype.smoothquant", ". api core", "algorithms.smoothquant algorithms.smooth_observers"),
    ("prototype.spinquant", ". spinquant", "algorithms.spinquant"),
    ("prototype", "int4_opaque_tensor", f"{_CONFIGS} int8_float8_views int4_views"),
    ("prototype.tensor_conversion", ".", ""),
    ("prototype.tensor_conversion", "api", "hardware"),
    ("quantization", ".", f"{_QUANT_API} {_PRIMITIVES} observers int8_matmul base_tensor {_QAT_CONFIGS}"),
    ("quantization.GPTQ", ". GPTQ", "linear_modules"),
    ("quantization", "transform_module", "quant_api configs.transforms"),
    ("quantization", "granularity", "@granularity"),
    ("quantization", "linear_activation_quantized_tensor", "v0_8_aqt"),
    ("quantization", "linear_quant_modules unified", "linear_modules"),
    ("quantization", "observer", "observers @granularity qparams hardware"),
    (
        "quantization",
        "quant_api",
        f"{_QUANT_API} {_PRIMITIVES} observers {_QAT_CONFIGS} configs.transforms groupwise hardware",
    ),
    ("quantization", "quant_primitives", f"{_PRIMITIVES} hardware"),
    ("quantization", "utils", "groupwise int8_matmul tools qparams primitives configs.transforms hardware"),
    ("quantization.prototype", ".", ""),
    ("quantization.prototype.qat", ". api embedding fake_quantizer linear", _QAT),
    ("quantization.prototype.qat", "_module_swap_api", "qat.module_swap"),
    ("quantization.qat", ". api embedding fake_quantize_config fake_quantizer linear two_step_quantizer", _QAT),
    ("quantization.qat", "utils", "qat.functions"),
    ("quantization.quantize_", ".", ""),
    ("quantization.quantize_.common", ".", f"enums {_TENSORS} protocols"),
    ("quantization.quantize_.common", "protocol", "protocols"),
    ("quantization.quantize_.common", "kernel_preference packing_format quantization_step", "enums"),
    ("quantization.quantize_.common", "quantize_tensor_kwargs", _TENSORS),
    ("quantization.quantize_.workflows", ".", f"{_TENSORS} enums"),
    ("quantization.quantize_.workflows.float8", ".", "int8_float8_views enums"),
    ("quantization.quantize_.workflows.float8", "float8_packing_format", "enums"),
    ("quantization.quantize_.workflows.float8", "float8_tensor", "int8_float8_views"),
    (
        "quantization.quantize_.workflows.float8",
        "float8_sparse_2x4_1d_data_1d_metadata_tensor float8_sparse_2x4_2d_data_2d_metadata_tensor",
        "int4_views",
    ),
    ("quantization.quantize_.workflows.int4", ".", "int8_float8_views int4_views enums"),
    ("quantization.quantize_.workflows.int4", "int4_choose_qparams_algorithm int4_packing_format", "enums"),
    ("quantization.quantize_.workflows.int4", "int4_opaque_tensor int4_tensor", "int8_float8_views int4_views"),
    (
        "quantization.quantize_.workflows.int4",
        "int4_plain_int32_tensor int4_preshuffled_tensor int4_tile_packed_to_4d_tensor",
        "int4_views",
    ),
    ("quantization.quantize_.workflows.int8", ". int8_tensor", "int8_float8_views int4_views"),
    ("quantization.quantize_.workflows.intx", ".", "int8_float8_views int4_views enums"),
    ("quantization.quantize_.workflows.intx", "intx_choose_qparams_algorithm intx_packing_format", "enums"),
    ("quantization.quantize_.workflows.intx", "intx_unpacked_to_int8_tensor", "int8_float8_views int4_views"),
    ("quantization.quantize_.workflows.intx", "intx_opaque_tensor", "int4_views"),
    ("quantization.quantize_.workflows.nf4", ". nf4_tensor", _NF4_MODULE),
    (
        "quantization",
        "pt2e",
        f"{_OBSERVERS} @graph_fake_quantize @graph_train_eval pt2e.graph_names qparams",
    ),
    (_PT2E, "_affine_quantization", "pt2e.affine_observers primitives"),
    (_PT2E, "convert prepare quantize_pt2e", "pt2e.graph_conversion"),
    (_PT2E, "export_utils", "@graph_train_eval"),
    (_PT2E, "fake_quantize", _FAKE_QUANTIZE),
    (_PT2E, "lowering", "pt2e.lowering"),
    (_PT2E, "observer", f"{_OBSERVERS} pt2e.graph_names qparams"),
    (_PT2E, "utils", "@graph_code_range"),
    (f"{_PT2E}.quantizer", ". quantizer utils composable_quantizer", _QUANTIZERS),
    (f"{_PT2E}.quantizer", "x86_inductor_quantizer", "@graph_x86 @graph_inductor pt2e.graph_names"),
    (f"{_PT2E}.quantizer", "arm_inductor_quantizer xpu_inductor_quantizer", "@graph_inductor"),
    (f"{_PT2E}.quantizer", "embedding_quantizer", "@graph_embedding"),
    ("testing", ".", ""),
    ("testing.pt2e", ".", ""),
    ("testing.pt2e", "_xnnpack_quantizer", "@graph_xnnpack"),
    (
        "testing.pt2e",
        "_xnnpack_quantizer_utils",
        "@graph_xnnpack @graph_annotators @graph_specs @graph_annotate pt2e.graph_names",
    ),
)
TREE: dict[str, tuple[str, ...]] = {
    package if module == "." else f"{package}.{module}".lstrip("."): tuple(dict.fromkeys(homes.split()))
    for package, modules, homes in _ROWS
    for module in modules.split()
}
