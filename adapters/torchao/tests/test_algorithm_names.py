"""Every public name of torchao's algorithm modules is served, except kernels, scripts and three tables."""

import importlib
import json
from pathlib import Path

import pytest

from pennyweight_torchao.module_tree import TREE
from pennyweight_torchao.removed import why_missing

HOME = "pennyweight_torchao"
NAMES = json.loads((Path(__file__).parent / "golden" / "torchao_names.json").read_text(encoding="utf-8"))
FAMILY = (
    "prototype.autoround", "prototype.awq", "prototype.gptq", "prototype.hqq", "prototype.moe_quant",
    "prototype.quant_logger", "prototype.quantization.autoquant_v2", "prototype.quantization.codebook",
    "prototype.quantization.gguf", "prototype.smoothquant", "prototype.spinquant", "quantization.GPTQ",
    "quantization.autoquant", "quantization.linear_quant_modules", "quantization.smoothquant",
)  # fmt: skip
UNSERVED = {
    "prototype.autoround.autoround_llm", "prototype.autoround.eval_autoround",
    "prototype.autoround.utils.get_float_model_info", "prototype.autoround.utils.import_dataloader",
    "prototype.autoround.utils.see_memory_usage", "prototype.gptq.gptq_example",
    "prototype.hqq.hqq_tinygemm_linear", "prototype.hqq.kernels", "prototype.hqq.mixed_mm.triton_mixed_mm",
    "prototype.hqq.triton_mixed_mm", "prototype.moe_quant.llama4_quant",
    "prototype.quantization.codebook_groupwise.CodebookQuantizedPackedTensor",
    "prototype.quantization.codebook_groupwise.EmbeddingLutQuantizer",
    "prototype.quantization.codebook_groupwise.QuantizedLutEmbedding",
    "prototype.quantization.codebook_groupwise.codebook_quantized_tensor",
    "prototype.spinquant._hadamard_matrices.get_had156", "prototype.spinquant._hadamard_matrices.get_had172",
    "prototype.spinquant._hadamard_matrices.get_had52", "quantization.GPTQ.GenericGPTQRunner",
}  # fmt: skip


@pytest.mark.parametrize("release", NAMES)
def test_names(release: str) -> None:
    absent = set()
    for module, names in NAMES[release].items():
        if not module.startswith(FAMILY):
            continue
        if module not in TREE:
            absent.add(module)
            continue
        served = importlib.import_module(f"{HOME}.{module}")
        absent |= {f"{module}.{name}" for name in names if not hasattr(served, name)}
    assert absent <= UNSERVED, absent - UNSERVED
    for path in absent:
        module, _, name = path.rpartition(".")
        assert why_missing(path, None) or why_missing(module, name), path


@pytest.mark.usefixtures("torchao")
def test_old_imports() -> None:
    from torchao.prototype.awq import AWQObservedLinear, awq_uintx, insert_awq_observer_  # noqa: F401
    from torchao.prototype.smoothquant.core import SmoothQuantObserver  # noqa: F401
    from torchao.quantization import autoquant
    from torchao.quantization.autoquant import AQInt8WeightOnlyQuantizedLinearWeight  # noqa: F401
    from torchao.quantization.GPTQ import Int4WeightOnlyGPTQQuantizer, MultiTensorInputRecorder  # noqa: F401
    from torchao.quantization.GPTQ_MT import replace_buffers_and_params_with_multitensors  # noqa: F401
    from torchao.quantization.quant_primitives import choose_qparams_gguf  # noqa: F401
    from torchao.quantization.smoothquant import swap_linear_with_smooth_fq_linear  # noqa: F401
    from torchao.quantization.utils import _MultiInput  # noqa: F401

    assert callable(autoquant)
