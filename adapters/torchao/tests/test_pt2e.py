"""Quantization of exported graphs under torchao's names equals torchao's recorded graphs and outputs."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from adapters.torchao.tests.golden import pt2e_cases as recorded

GOLDEN = Path(__file__).parent / "golden" / "torchao_0.18_pt2e.json"
GRAPHS = json.loads(GOLDEN.read_text(encoding="utf-8"))["graphs"]
OUTPUTS = load_file(GOLDEN.with_suffix(".safetensors"))
CASES = {name: rest for name, *rest in recorded.cases()}
pytestmark = pytest.mark.usefixtures("torchao")


def test_every_case_was_recorded() -> None:
    assert CASES.keys() == GRAPHS.keys() == OUTPUTS.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_torchaos(name: str) -> None:
    """The same operators in the same order, with the same scales and zero points; the output to the last bits."""
    model, qat, make = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # max_pool2d without a quantized input, in both libraries
        graph, output = recorded.run(model, qat, make())
    assert numbers_rounded(recorded.lines(graph)) == numbers_rounded(GRAPHS[name])
    torch.testing.assert_close(output, OUTPUTS[name], rtol=1e-5, atol=1e-6)


def numbers_rounded(lines: list[str]) -> list[list[str]]:
    """Scales have seven digits on every processor; sums before them may have been added in another order."""

    def short(part: str) -> str:
        try:
            return f"{float(part):.5g}"
        except ValueError:
            return part

    return [[short(part.strip()) for part in line.split(",")] for line in lines]


def exported(model: nn.Module, *inputs: Tensor) -> Any:
    return torch.export.export(model.eval(), inputs).module()


def test_a_users_script() -> None:
    """As torchao's tutorial."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as xiq
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    model, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(5, 16)
    quantizer = xiq.X86InductorQuantizer()
    quantizer.set_global(xiq.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported(model, x), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    move_exported_model_to_eval(converted)
    torch.testing.assert_close(converted(x), model(x), atol=0.05, rtol=0)
    lowered = lower_pt2e_quantized_to_x86(converted, (x,))
    torch.testing.assert_close(lowered(x), converted(x))


def test_affine_observers_give_torchaos_operators() -> None:
    from torchao.quantization.pt2e import MappingType, PerAxis, PerTensor
    from torchao.quantization.pt2e._affine_quantization import (
        AffineQuantizedMinMaxObserver,
        AffineQuantizedPlaceholderObserver,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

    class Affine(Quantizer):
        def annotate(self, model: Any) -> Any:
            for node in model.graph.nodes:
                if node.target is not torch.ops.aten.linear.default:
                    continue
                weight = AffineQuantizedMinMaxObserver.with_args(
                    mapping_type=MappingType.SYMMETRIC, target_dtype=torch.int8, granularity=PerAxis(0)
                )
                act = AffineQuantizedPlaceholderObserver.with_args(
                    mapping_type=MappingType.ASYMMETRIC,
                    target_dtype=torch.int8,
                    granularity=PerTensor(),
                    is_dynamic=True,
                )
                specs = {
                    node.args[1]: QuantizationSpec(torch.int8, weight),
                    node.args[0]: QuantizationSpec(torch.int8, act, is_dynamic=True),
                }
                node.meta["quantization_annotation"] = QuantizationAnnotation(specs, _annotated=True)
            return model

        def validate(self, model: Any) -> None:
            pass

    model, x = nn.Sequential(nn.Linear(16, 8)), torch.randn(5, 16)
    prepared = prepare_pt2e(exported(model, x), Affine())
    prepared(x)
    graph = convert_pt2e(prepared)
    found = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert [t for t in found if "torchao" in t] == [
        "torchao.dequantize_affine", "torchao.choose_qparams_affine", "torchao.quantize_affine",
        "torchao.dequantize_affine",
    ]  # fmt: skip
    assert graph._frozen_param0.dtype is torch.int8
    torch.testing.assert_close(graph(x), model(x), atol=0.05, rtol=0)
