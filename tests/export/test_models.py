"""Whole models: what is around the weights, free axes, ties, and what is left of the bytes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.spec import FP8_ROW, UINT4_GROUP
from pennyweight.export.onnx import export_onnx
from pennyweight.export.text_models import text_model

INT8, INT8_DYNAMIC = pw.Int8WeightOnlyConfig(), pw.Int8DynamicActivationInt8WeightConfig()
UINT4 = pw.UIntXWeightOnlyConfig(group_size=32)
# Nothing is learnt from a shape that both calls have in common
BATCH, SEQUENCE = 3, 11


@contextlib.contextmanager
def sessions(path: Any) -> Iterator[list[onnxruntime.InferenceSession]]:
    """With graph optimizations off, and as they come."""
    made = []
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.log_severity_level = 3
        made.append(onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]))
    yield made


def assert_runs_alike(path: Any, module: nn.Module, inputs: dict[str, Tensor], tolerance: float = 5e-6) -> None:
    with torch.no_grad():
        y = module(*inputs.values())
    with sessions(path) as both:
        for session in both:
            (got,) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
            assert got.shape == tuple(y.shape)
            assert np.abs(got - y.numpy()).max() <= tolerance * float(y.abs().max())


def everything(module: nn.Module, name: str) -> bool:
    return "Norm" not in type(module).__name__


def initializer_bytes(path: Any) -> int:
    return sum(onnx.numpy_helper.to_array(t).nbytes for t in onnx.load(str(path)).graph.initializer)


class Block(nn.Module):
    """A linear layer used twice, one without bias, and a table tied to a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(2):
            x = x + self.down(self.up(x).relu())
        return self.head(x)


@pytest.mark.parametrize("config", [INT8, pw.NF4WeightOnlyConfig()], ids=["int8", "nf4"])
def test_ties_and_a_layer_used_twice_are_stored_once(config: Any, tmp_path: Path) -> None:
    model = Block().eval()
    pw.quantize_(model, config, filter_fn=everything)
    path = tmp_path / "block.onnx"
    report = export_onnx(model, (torch.randint(0, 50, (2, 5)),), path)
    assert [r.name for r in report.quantized] == ["table.weight", "up.weight", "down.weight"]
    assert report.rows[0].kernel.startswith("Gather + decode, ")
    held = [t.name for t in onnx.load(str(path)).graph.initializer]
    assert len([n for n in held if n.endswith(".codes")]) == 3
    inside = initializer_bytes(path)
    assert report.bytes_after <= inside <= report.bytes_after + 1200  # and the constants of the forms
    assert_runs_alike(path, model, {report.inputs[0]: torch.randint(0, 50, (BATCH, 5))})


@pytest.mark.parametrize(
    ("config", "ratio"),
    [
        (INT8, 1.0),
        (pw.Int4WeightOnlyConfig(group_size=128), 1.0),
        (pw.IntxWeightOnlyConfig(weight_dtype="int2", granularity=pw.PerGroup(64)), 1.0),
        (pw.IntxWeightOnlyConfig(weight_dtype="int3", granularity=pw.PerGroup(64)), 1.29),  # 3 bits in 4
        (pw.Float8WeightOnlyConfig(), 1.0),
        (pw.NF4WeightOnlyConfig(), 1.11),  # 8-bit scales as float32
    ],
    ids=["int8", "int4", "int2", "int3", "float8", "nf4"],
)
def test_the_file_is_as_small_as_the_weights(config: Any, ratio: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 512, bias=False)).eval()
    pw.quantize_(model, config)
    nbytes = model[0].weight.to_layout("bits" if model[0].weight.spec.format.bits < 8 else "plain").nbytes
    path = tmp_path / "one.onnx"
    report = export_onnx(model, (torch.randn(2, 256),), path)
    assert nbytes * 0.9 <= report.bytes_after <= nbytes * ratio
    assert initializer_bytes(path) <= report.bytes_after + 1100  # 256 numbers of float8
    assert path.stat().st_size <= report.bytes_after + 6000  # the graph itself


@pytest.mark.parametrize(("config", "style"), [(INT8, "qdq"), (UINT4, "qdq"), (INT8_DYNAMIC, "auto")])
def test_ties_whose_uses_read_them_differently(config: Any, style: str, tmp_path: Path) -> None:
    model, path = Block().eval(), tmp_path / "block.onnx"
    pw.quantize_(model, config, filter_fn=lambda m, n: n in ("table", "head"))
    report = export_onnx(model, (torch.randint(0, 50, (2, 5)),), path, style=style)
    (row,) = report.quantized
    second = {"qdq": "DequantizeLinear + MatMul", "auto": "MatMulInteger"}[style]
    assert row.kernel == f"Gather + decode, {second}"
    ids = torch.randint(0, 50, (BATCH, 5))
    with torch.no_grad(), sessions(path) as (plain, _):
        (got,) = plain.run(None, {report.inputs[0]: ids.numpy()})
        y = model(ids)
        # one step of one input's code may differ, where the float32 of the layers before does
        slack = 0.02 if config is INT8_DYNAMIC else 5e-6
        assert np.abs(got - y.numpy()).max() <= slack * float(y.abs().max())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 12, 3, groups=2, padding="same", bias=False)
        self.line = nn.Conv1d(12, 6, 3, stride=2)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.first(x).relu())
        return self.head(self.line(x.flatten(2)).mean(-1))


@pytest.mark.parametrize("style", ["auto", "qdq"])
@pytest.mark.parametrize(
    "config", [INT8, pw.SpecConfig(UINT4_GROUP.with_(block=(2, -1, -1))), pw.SpecConfig(FP8_ROW.with_(block=None))],
    ids=["int8", "uint4", "float8"],
)  # fmt: skip
def test_convolutions(config: Any, style: str, tmp_path: Path) -> None:
    model = Convolutions().eval()
    pw.quantize_(model, config, filter_fn=lambda m, n: isinstance(m, nn.Conv2d))
    path = tmp_path / "conv.onnx"
    report = export_onnx(model, (torch.randn(2, 3, 6, 6),), path, style=style)
    assert {r.name for r in report.quantized} == {"first.weight", "grouped.weight"}
    assert {r.kernel for r in report.quantized} == {"decode" if style == "auto" else "DequantizeLinear"}
    assert_runs_alike(path, model, {report.inputs[0]: torch.randn(BATCH, 3, 6, 6)})


def test_convolutions_with_quantized_inputs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv1d(8, 4, 1)).eval()
    pw.quantize_(model, INT8_DYNAMIC, filter_fn=everything)
    path = tmp_path / "conv.onnx"
    report = export_onnx(model[:1], (torch.randn(2, 3, 6, 6),), path)
    assert [r.kernel for r in report.quantized] == ["quantized input, decode"]
    assert_runs_alike(path, model[:1], {report.inputs[0]: torch.randn(BATCH, 3, 6, 6)})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_weight_in_pieces(tmp_path: Path) -> None:
    model = Attention().eval()
    pw.quantize_(model, INT8)
    path = tmp_path / "attention.onnx"
    report = export_onnx(model, (torch.randn(2, 5, 32),), path)
    assert len(report.quantized) == 2
    assert_runs_alike(path, model, {report.inputs[0]: torch.randn(BATCH, 5, 32)})


class Products(nn.Module):
    """A transposed weight by each op that multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        w, rows = self.layer.weight, x.reshape(-1, 32)
        return (
            x @ w.t(), rows.mm(w.T), torch.addmm(self.layer.bias, rows, w.transpose(0, 1)),
            torch.addmm(self.layer.bias, rows, w.t(), alpha=2), w @ rows.t(),
        )  # fmt: skip


def test_products_with_a_transposed_weight(tmp_path: Path) -> None:
    model, path = Products().eval(), tmp_path / "products.onnx"
    pw.quantize_(model, pw.SpecConfig(UINT4_GROUP.with_(block=(16,))))
    report = export_onnx(model, (torch.randn(2, 5, 32),), path)
    kinds = [n.op_type for n in onnx.load(str(path)).graph.node]
    assert kinds.count("MatMulNBits") == 3
    x = torch.randn(BATCH, 5, 32)
    with torch.no_grad(), sessions(path) as both:
        for session in both:
            for got, y in zip(session.run(None, {report.inputs[0]: x.numpy()}), model(x), strict=True):
                assert np.abs(got - y.numpy()).max() <= 5e-6 * float(y.abs().max())


def test_a_frozen_model(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).eval(), tmp_path / "frozen.onnx"
    pw.quantize_(model, UINT4)
    pw.inference.freeze_(model)
    report = export_onnx(model, (torch.randn(2, 64),), path)
    assert [r.name for r in report.quantized] == ["0.weight", "1.weight"]
    assert isinstance(model[0], pw.inference.FrozenLinear)
    assert_runs_alike(path, model, {report.inputs[0]: torch.randn(BATCH, 64)})


# -- transformers ----------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=24,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=24, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


def text_inputs() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": torch.randint(0, 96, (BATCH, SEQUENCE)), "attention_mask": mask}


@pytest.mark.parametrize(
    ("make", "config"), [(bert, INT8), (llama, UINT4), pytest.param(gpt2, UINT4, marks=pytest.mark.exhaustive)]
)
def test_text_models(make: Any, config: Any, tmp_path: Path) -> None:
    model, path = make(), tmp_path / "text.onnx"
    pw.quantize_(model, config, filter_fn=everything)
    text = text_model(model)
    report = export_onnx(text.module, (), path, **text.arguments)
    quantized = sum(isinstance(p, pw.AffineQuantizedTensor) for p in model.parameters())
    assert len(report.quantized) == quantized
    assert report.inputs == ["input_ids", "attention_mask"]
    assert report.outputs == ["last_hidden_state" if make is bert else "logits"]
    graph = onnx.load(str(path)).graph
    for value in [*graph.input, *graph.output]:
        sizes = [d.dim_param for d in value.type.tensor_type.shape.dim]
        assert sizes[:2] == ["batch", "sequence"]
    assert_runs_alike(path, text.module, text_inputs())
    assert_runs_alike(path, text.module, {k: v[:1, :3] for k, v in text_inputs().items()})


@torch.no_grad()
def test_a_text_model_with_quantized_inputs(tmp_path: Path) -> None:
    """Layers are equal bit for bit (test_forms.py). Between them onnxruntime's float32 differs in last bits, and where
    that moves an input across a rounding boundary its code differs by one: so it does in torch, from such noise."""
    model, path = bert(), tmp_path / "text.onnx"
    pw.quantize_(model, INT8_DYNAMIC)
    text, inputs = text_model(model), text_inputs()
    export_onnx(text.module, (), path, **text.arguments)
    y = text.module(**inputs).flatten(1)
    noise = model.embeddings.register_forward_hook(lambda m, i, out: out * (1 + 1e-6 * torch.randn_like(out)))
    moved = [float((text.module(**inputs).flatten(1) - y).norm() / y.norm()) for _ in range(3)]
    noise.remove()
    with sessions(path) as both:
        for session in both:
            got = torch.from_numpy(session.run(None, {k: v.numpy() for k, v in inputs.items()})[0]).flatten(1)
            assert float((got - y).norm() / y.norm()) <= max(5 * max(moved), 1e-5)


def test_what_text_model_refuses() -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(ValueError, match=r"ViTModel: only models with input_ids.* its main input is pixel_values"):
        text_model(transformers.ViTModel(config))
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration: only models with input_ids and one stack"):
        text_model(transformers.T5ForConditionalGeneration(config))


class Recurrent(nn.Module):
    def __init__(self, net: type[nn.Module]) -> None:
        super().__init__()
        self.net = net(16, 24, 2, batch_first=True, bidirectional=True)
        self.up = nn.ConvTranspose1d(48, 8, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.net(x)[0].transpose(1, 2))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.net._flat_weights")  # torch.export, also of float ones
@pytest.mark.parametrize("net", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.exhaustive)])
def test_recurrent_networks_and_transposed_convolutions(net: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurrent(net).eval()
    pw.quantize_(model, INT8, filter_fn=everything)
    path = tmp_path / "recurrent.onnx"
    report = export_onnx(model, (torch.randn(2, 5, 16),), path)
    assert len(report.quantized) == 9
    assert_runs_alike(path, model, {report.inputs[0]: torch.randn(BATCH, 5, 16)})
    pw.quantize_(model, INT8_DYNAMIC, filter_fn=everything)
    with pytest.raises(ValueError, match=r"up\.weight: .*can be exported only for linear layers and convolutions"):
        export_onnx(model, (torch.randn(2, 5, 16),), path)
