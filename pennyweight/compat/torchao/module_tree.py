"""The module tree of torchao for all releases from 0.8 to 0.18, and the finder that serves it as virtual modules.

A module exposes all names of its files, so it has the names of all releases at once: more than any single release.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dis import opmap
from types import ModuleType
from typing import Any

__all__ = ["TREE", "VirtualModules"]

# Names of pennyweight that are torchao's too and need no adapter: "@name" in the tree -> module, names.
REEXPORTS: dict[str, tuple[str, str]] = {
    "@configs": (
        "pennyweight.planning.configs",
        "AOBaseConfig AOPerModuleConfig FPXWeightOnlyConfig Float8DynamicActivationFloat8WeightConfig "
        "Float8DynamicActivationInt4WeightConfig Float8StaticActivationFloat8WeightConfig Float8WeightOnlyConfig "
        "FqnToConfig Int8StaticActivationInt8WeightConfig Int8WeightOnlyConfig MXDynamicActivationMXWeightConfig "
        "ModuleFqnToConfig NF4WeightOnlyConfig NVFP4WeightOnlyConfig UIntXWeightOnlyConfig "
        "float8_dynamic_activation_float8_weight float8_static_activation_float8_weight float8_weight_only "
        "fpx_weight_only int8_weight_only uintx_weight_only",
    ),
    "@granularity": (
        "pennyweight.planning.granularity",
        "Granularity MappingType PerAxis PerBlock PerGroup PerRow PerTensor PerToken",
    ),
    "@optim": (
        "pennyweight.optim",
        "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8 CPUOffloadOptimizer",
    ),
}

_CONFIGS = "v0_8_configs prototype_quantization.float8_static @configs"
_PRIMITIVES = "primitives format_primitives hqq qparams enums"
_TENSORS = "int8_float8_views int4_views block_views"
_QUANT_API = f"quant_api {_CONFIGS} enums @granularity linear_modules {_TENSORS} v0_8_aqt v0_8_layouts groupwise"
_QAT = "qat_configs qat_modules"
_PARQ_QUANT = "parq.quantizers parq.least_squares parq.affine_quantizers parq.stretched_grid parq.conversion"
_UINTX = "prototype_quantization.uintx_packed"
_SPARSE = "sparse.api sparse.wanda sparse.supermask sparse.masks sparse.pruning"
_PARQ = f"parq.optimizer parq.prox_maps {_PARQ_QUANT}"

# Package of torchao, modules in it ("." is the package itself), files here with their names.
_ROWS = (
    ("", ".", "quant_api"),
    ("", "utils", "tools hardware base_tensor dispatch"),
    ("core", ".", ""),
    ("core", "config", "config_json"),
    ("dtypes", ".", f"v0_8_aqt v0_8_layouts {_TENSORS}"),
    ("dtypes", "affine_quantized_tensor", "v0_8_aqt v0_8_layouts enums"),
    ("dtypes", "affine_quantized_tensor_ops", "legacy_weights"),
    ("dtypes", "nf4tensor", "int8_float8_views block_views"),
    ("dtypes", "utils", "v0_8_layouts tools hardware"),
    ("dtypes.floatx", ". float8_layout floatx_tensor_core_layout", "v0_8_layouts"),
    ("dtypes.uintx", ".", "v0_8_layouts"),
    ("dtypes.uintx", "bitpacking uint4_layout", "v0_8_layouts"),
    (
        "dtypes.uintx",
        "block_sparse_layout dyn_int8_act_int4_wei_cpu_layout int4_cpu_layout int4_xpu_layout marlin_sparse_layout "
        "packed_linear_int8_dynamic_activation_intx_weight_layout plain_layout q_dq_layout semi_sparse_layout "
        "tensor_core_tiled_layout uintx_layout",
        "v0_8_layouts",
    ),
    ("experimental", ".", ""),
    ("experimental", "quant_api", "prototype_quantization.embeddings"),
    ("float8", ". config float8_linear float8_linear_utils fsdp_utils types", "float8_training"),
    ("float8", "float8_utils", "float8_functions float8_training"),
    ("float8", "inference", "enums"),
    ("kernel", ". intmm", "int8_matmul"),
    ("optim", ". adam cpu_offload", "@optim training"),
    ("prototype", ".", ""),
    ("prototype", "custom_fp_utils", "format_primitives"),
    ("prototype.dtypes", ".", "v0_8_layouts"),
    ("prototype.dtypes.uintx", ".", "v0_8_layouts"),
    ("prototype.dtypes.uintx", "bitpacking", "v0_8_layouts"),
    ("prototype.dtypes.uintx", "uintx_utils", "v0_8_layouts"),
    ("prototype.low_bit_optim", ". adam cpu_offload", "@optim training"),
    ("prototype.mx_formats", ". inference_workflow", f"{_CONFIGS} int8_float8_views block_views enums"),
    ("prototype.mx_formats", "config", "enums"),
    ("prototype.mx_formats", "mx_tensor nvfp4_tensor", "int8_float8_views block_views enums"),
    ("prototype.dora", ".", ""),
    ("prototype.dora", "dora_layer", "low_rank.dora"),
    ("prototype.galore", ".", ""),
    ("prototype.galore", "utils", "low_rank.galore"),
    ("prototype.galore.optim", ". galore_torch", "low_rank.galore"),
    ("prototype.paretoq", ".", ""),
    ("prototype.paretoq.models", ".", ""),
    ("prototype.paretoq.models", "utils_quant", "paretoq.quantize_linear"),
    ("prototype.parq", ".", f"{_PARQ} parq.param_groups"),
    ("prototype.parq", "api", "parq.param_groups parq.optimizer"),
    ("prototype.parq", "utils", "parq.prox_maps"),
    ("prototype.parq.optim", ".", "parq.prox_maps parq.optimizer"),
    ("prototype.parq.optim", "binarelax parq proxmap", "parq.prox_maps"),
    ("prototype.parq.optim", "quantopt", "parq.optimizer"),
    ("prototype.parq.quant", ". config_torchao lsbq quant_api quantizer uniform uniform_torchao", _PARQ_QUANT),
    ("prototype.quantization", ". quant_api", f"{_UINTX} {_CONFIGS}"),
    ("prototype.quantization.embedding", ". api", "prototype_quantization.embeddings"),
    (
        "prototype.quantization.float8_static_quant",
        ". prototype_float8_tensor",
        "prototype_quantization.float8_static_tensor",
    ),
    ("prototype.quantization.int8_lut_tensor", ". int8_lut_tensor", "prototype_quantization.int8_lut"),
    ("prototype.quantization.uintx", ". uintx_bit_packed_tensor", _UINTX),
    ("prototype.quantization.int4", ".", f"{_CONFIGS} int8_float8_views int4_views"),
    ("prototype.quantization.int4", "inference_workflow", _CONFIGS),
    ("prototype.quantization.int4", "int4_opaque_tensor", "int8_float8_views int4_views"),
    ("prototype.quantized_training", ". bitnet int8 int8_mixed_precision", "training"),
    ("prototype.safetensors", ".", ""),
    ("prototype.safetensors", "safetensors_support safetensors_utils", "safetensors_state"),
    ("sparsity", ".", f"{_SPARSE} v0_8_configs"),
    ("sparsity", "sparse_api", "sparse.api"),
    ("sparsity", "blocksparse", "sparse.block_sparse"),
    ("sparsity", "marlin utils", "sparse.masks sparse.wanda"),
    ("sparsity", "supermask", "sparse.supermask"),
    ("sparsity", "wanda", "sparse.wanda sparse.pruning"),
    ("sparsity.training", ". autograd", "sparse.training"),
    ("sparsity.prototype.superblock", ".", ""),
    ("sparsity.prototype.superblock", "blocksparse", "sparse.block_sparse"),
    ("sparsity.prototype.superblock", "supermask", "sparse.supermask"),
    *(
        row
        for home in ("prototype.sparsity", "sparsity.prototype")
        for row in (
            (home, ".", "sparse.pruning"),
            (f"{home}.scheduler", ". base_scheduler cubic_scheduler lambda_scheduler", "sparse.pruning"),
            (
                f"{home}.sparsifier",
                ". base_sparsifier nearly_diagonal_sparsifier utils weight_norm_sparsifier",
                "sparse.pruning",
            ),
            (
                f"{home}.pruner",
                ". FPGM_pruner base_structured_sparsifier lstm_saliency_pruner match_utils parametrization "
                "prune_functions saliency_pruner",
                "sparse.structured_pruning",
            ),
        )
    ),
    ("quantization", ".", f"{_QUANT_API} {_PRIMITIVES} observers legacy_weights int8_matmul base_tensor qat_configs"),
    ("quantization", "autoquant transform_module", "quant_api"),
    (
        "quantization",
        "dynamic_quant linear_activation_scale linear_activation_weight_observed_tensor subclass weight_only "
        "weight_tensor_linear_activation_quantization",
        "legacy_weights",
    ),
    ("quantization", "granularity", "@granularity"),
    ("quantization", "linear_activation_quantized_tensor", "v0_8_aqt"),
    ("quantization", "linear_quant_modules unified", "linear_modules"),
    ("quantization", "observer", "observers"),
    ("quantization", "quant_api", f"{_QUANT_API} {_PRIMITIVES} observers legacy_weights qat_configs"),
    ("quantization", "quant_primitives", _PRIMITIVES),
    ("quantization", "utils", "groupwise int8_matmul tools qparams"),
    ("prototype.tensor_conversion", ".", ""),
    ("prototype.tensor_conversion", "api", "hardware"),
    ("quantization.prototype", ".", ""),
    ("quantization.prototype.qat", ". api embedding fake_quantizer linear", _QAT),
    ("quantization.qat", ". api embedding fake_quantize_config fake_quantizer linear two_step_quantizer", _QAT),
    ("quantization.quantize_", ".", ""),
    ("quantization.quantize_.common", ".", f"enums {_TENSORS}"),
    ("quantization.quantize_.common", "kernel_preference packing_format quantization_step", "enums"),
    ("quantization.quantize_.common", "quantize_tensor_kwargs", _TENSORS),
    ("quantization.quantize_.workflows", ".", f"{_TENSORS} enums"),
    ("quantization.quantize_.workflows.float8", ".", "int8_float8_views block_views enums"),
    ("quantization.quantize_.workflows.float8", "float8_packing_format", "enums"),
    ("quantization.quantize_.workflows.float8", "float8_tensor", "int8_float8_views block_views"),
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
    ("quantization.quantize_.workflows.nf4", ". nf4_tensor", "int8_float8_views block_views"),
    ("testing", ".", ""),
    ("testing", "model_architectures", "model_architectures"),
    ("testing", "utils", "harness harness_parallel hardware"),
)
TREE: dict[str, tuple[str, ...]] = {
    package if module == "." else f"{package}.{module}".lstrip("."): tuple(dict.fromkeys(homes.split()))
    for package, modules, homes in _ROWS
    for module in modules.split()
}


_IMPORT_FROM = opmap["IMPORT_FROM"]


class VirtualModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and creates the modules of a table, under a prefix.

    tree     module path below the prefix ("" is the root) -> files of ``home`` whose names it exposes, and reexports
    missing  (path of a module, name in it or None) -> why it is missing and what to use instead, or None
    version  the result of ``importlib.metadata.version(prefix)``; None: no metadata
    """

    def __init__(
        self, prefix: str, home: str, tree: Mapping[str, Sequence[str]],
        missing: Callable[[str, str | None], str | None], version: str | None = None,
    ) -> None:  # fmt: skip
        self.prefix, self.home, self.tree, self.missing, self.version = prefix, home, tree, missing, version
        self.packages = {path.rpartition(".")[0] for path in tree if path} | {""}

    def _path(self, fullname: str) -> str | None:
        if fullname == self.prefix:
            return ""
        start = f"{self.prefix}."
        return fullname.removeprefix(start) if fullname.startswith(start) else None

    # -- finding and loading -----------------------------------------------------------------------------------------

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        inner = self._path(fullname)
        if inner is None or (inner == "" and self.prefix == self.home):
            return None
        if inner in self.tree:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=inner in self.packages)
        why = self.missing(inner, None)
        if why is not None:
            raise ModuleNotFoundError(f"{fullname}: {why}", name=fullname)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Virtual(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        inner = self._path(module.__name__)
        assert inner is not None
        homes = self.tree[inner]

        def get(name: str) -> Any:
            if name == "__all__":
                return sorted({n for home in homes for n in self._names(home)[1]})
            if not (name.startswith("__") and name.endswith("__")) and not self._is_file(inner, name):
                for home in homes:
                    source, names = self._names(home)
                    if name in names or (home not in REEXPORTS and name in source.__dict__):
                        value = getattr(source, name)
                        setattr(module, name, value)
                        return value
                path = f"{inner}.{name}" if inner else name
                if path in self.tree:  # a submodule that the real package imports itself
                    return importlib.import_module(f"{module.__name__}.{name}")
                why = self.missing(inner, name)
                if why is not None:
                    raise _no_name(f"{module.__name__}.{name}: {why}")
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__doc__ = f"{module.__name__}, served by pennyweight."
        module.__getattr__ = get  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted({*module.__dict__, *get("__all__")})  # type: ignore[method-assign]
        if inner == "" and self.version is not None:
            module.__version__ = self.version  # type: ignore[attr-defined]

    def _is_file(self, inner: str, name: str) -> bool:
        """Whether ``from . import name`` of a file here asks, which imports the file itself: to search it among the
        root's names would import their files first, in a cycle."""
        at_home = inner == "" and self.prefix == self.home
        path = sys.modules[self.home].__path__ if at_home else []
        return at_home and importlib.machinery.PathFinder.find_spec(f"{self.home}.{name}", path) is not None

    def _names(self, home: str) -> tuple[ModuleType, Sequence[str]]:
        """The module behind an entry of the tree, and its public names."""
        if home in REEXPORTS:
            path, names = REEXPORTS[home]
            return importlib.import_module(path), names.split()
        module = importlib.import_module(f"{self.home}.{home}")
        return module, module.__all__

    # -- metadata ----------------------------------------------------------------------------------------------------

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        asked = getattr(context, "name", None)
        if self.version is not None and asked in (None, self.prefix):
            yield _Metadata(self.prefix, self.version)


def _no_name(text: str) -> Exception:
    """ImportError for ``from module import name``, which would discard the text of an AttributeError; else
    AttributeError, so that hasattr() and getattr() with a default work."""
    frame = sys._getframe(2)
    code = frame.f_code.co_code
    asked = 0 <= frame.f_lasti < len(code) and code[frame.f_lasti] == _IMPORT_FROM
    return ImportError(text) if asked else AttributeError(text)


class _Virtual(ModuleType):
    """A module whose own names take precedence over its submodules: ``quantization.quantize_`` is a function and a
    package, and importing the package must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in self.__getattr__("__all__"):
            return
        super().__setattr__(name, value)


class _Metadata(importlib.metadata.Distribution):
    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: served by pennyweight\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path
