"""Every format that can be written: a model goes there and comes back, exactly where the format has its numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.formats import E4M3, E5M2, INT3, INT4, INT8, NF4, UINT4
from pennyweight.core.spec import FP8_BLOCK, FP8_ROW, FP8_TENSOR, INT8_ROW, MXFP4, NVFP4, TINYGEMM, ActivationSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError
from pennyweight.io.codecs import CODECS
from pennyweight.io.convert_checkpoint import formats

F16 = torch.float16
INT4_32 = pw.QuantSpec(INT4, (32,), scale=F16)
ZEROS = pw.QuantSpec(UINT4, (32,), scale=F16, zero_point=True)
TOKEN = ActivationSpec(INT8_ROW)
# (spec, activation) that a format has as it is
EXACT: dict[str, list[tuple[pw.QuantSpec, ActivationSpec | None]]] = {
    "compressed-tensors": [
        (INT8_ROW, None), (INT8_ROW, TOKEN), (INT4_32, None), (pw.QuantSpec(INT3, (64,), scale=F16), None),
        (ZEROS, None), (FP8_ROW, None), (FP8_TENSOR, None), (FP8_BLOCK, None), (MXFP4, None),
    ],
    "gptq": [(INT4_32, None), (pw.QuantSpec(UINT4, (32,), scale=F16, mid=8), None)],
    "gptq_v2": [(INT4_32, None), (ZEROS, None), (pw.QuantSpec(INT3, (64,), scale=F16), None)],
    "awq": [(ZEROS, None), (INT4_32, None)],
    "bitsandbytes": [(INT8_ROW, None), (pw.QuantSpec(NF4, (64,)), None)],
    "fp8": [(FP8_BLOCK, None)],
    "mxfp4": [],  # of experts only, see below
}  # fmt: skip
CASES = [(name, spec, act) for name, some in EXACT.items() for spec, act in some]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 128)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.norm = nn.LayerNorm(128)
        self.lm_head = nn.Linear(128, 64, bias=False)


def saved(folder: Path, spec: pw.QuantSpec, act: ActivationSpec | None = None) -> dict[str, Tensor]:
    """A folder with two quantized layers and one that stays float."""
    model = Net().half()
    pw.quantize_(model, pw.SpecConfig(spec, act=act), filter_fn=lambda m, name: name in ("up", "down"))
    pw.save(model, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "hidden_size": 128}))
    return model.state_dict()


def test_the_table_is_complete() -> None:
    written = {codec.name for codec in CODECS if codec.writing is not None}
    assert written == EXACT.keys()
    assert set(formats()) == {"pennyweight", "float", "gguf", *written}


@pytest.mark.parametrize(("to", "spec", "act"), CASES, ids=str)
def test_there_and_back_is_exact(to: str, spec: pw.QuantSpec, act: ActivationSpec | None, tmp_path: Path) -> None:
    state = saved(tmp_path / "own", spec, act)
    report = pw.convert(tmp_path / "own", tmp_path / "there", to=to)
    assert {row.note for row in report.quantized} == {"exact"}
    assert {row.sqnr for row in report.quantized} == {float("inf")}
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] not in ("pennyweight", None)
    with pw.open(tmp_path / "there") as checkpoint:
        assert checkpoint.format == to
        assert set(checkpoint) == state.keys()
        assert checkpoint.quantized.keys() == {"up.weight", "down.weight"}
        # The fp8 of DeepSeek has no weights without quantized inputs
        assert to == "fp8" or all(meta.act == act for meta in checkpoint.quantized.values())
    pw.convert(tmp_path / "there", tmp_path / "back")
    for name, tensor in pw.load(tmp_path / "back").items():
        expected = state[name]
        if isinstance(expected, QT):
            assert isinstance(tensor, QT)
            assert torch.equal(tensor.dequantize(), expected.dequantize()), name
        else:
            assert torch.equal(tensor, expected), name
    again = pw.convert(tmp_path / "back", tmp_path / "again", to=to)
    assert {row.note for row in again.quantized} == {"exact"}
    first, second = (load_file(tmp_path / f / "model.safetensors") for f in ("there", "again"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():  # the format is canonical: the same bytes
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


@pytest.mark.parametrize("to", EXACT)
@pytest.mark.parametrize("spec", [TINYGEMM, NVFP4, INT8_ROW, pw.QuantSpec(E4M3, (128,))], ids=str)
def test_what_a_format_lacks_is_requantized_or_refused_and_told(to: str, spec: pw.QuantSpec, tmp_path: Path) -> None:
    state = saved(tmp_path / "own", spec)
    try:
        report = pw.convert(tmp_path / "own", tmp_path / "there", to=to)
    except CheckpointError as e:
        assert f"no tensor can stay quantized as {to}" in str(e)  # noqa: PT017
        assert not (tmp_path / "there").exists()
        return
    after = pw.load(tmp_path / "there")
    for row in report.quantized:
        was, now = state[row.name].dequantize(torch.float32), after[row.name].dequantize(torch.float32)
        noise = float((was - now).double().norm())
        measured = float("inf") if noise == 0 else 20 * torch.log10(was.double().norm() / noise).item()
        # NVFP4 of ours may move in the last bit of a float32 scale where files divide by a global scale
        assert row.sqnr == pytest.approx(measured, abs=0.05) or min(row.sqnr, measured) > 130, row
        assert (row.note == "exact") == (row.sqnr == float("inf"))


def test_codes_stay_where_only_scales_are_rounded(tmp_path: Path) -> None:
    state = saved(tmp_path / "own", pw.QuantSpec(INT8, (32,)))
    report = pw.convert(tmp_path / "own", tmp_path / "there", to="compressed-tensors")
    assert min(row.sqnr for row in report.quantized) > 60
    after = pw.load(tmp_path / "there")
    assert torch.equal(after["up.weight"].codes, state["up.weight"].codes)


def test_a_static_activation_goes_along(tmp_path: Path) -> None:
    model = Net().half()
    pw.quantize_(
        model, pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.02)),
        filter_fn=lambda m, name: name == "up",
    )  # fmt: skip
    pw.save(model, tmp_path / "own")
    pw.convert(tmp_path / "own", tmp_path / "there", to="compressed-tensors")
    fresh = Net().half()
    pw.load(tmp_path / "there", fresh)
    x = torch.randn(3, 128, dtype=F16)
    assert torch.equal(fresh.up(x), model.up(x))


def test_experts_go_to_gpt_oss_and_back(tmp_path: Path) -> None:
    w = QT.from_float(torch.randn(2, 64, 96), MXFP4).transpose(-2, -1)  # [experts, in, out], blocks along in
    b = torch.randn(2, 64)
    pw.save({"mlp.experts.gate_up_proj": w, "mlp.experts.gate_up_proj_bias": b}, tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text("{}")
    report = pw.convert(tmp_path / "own", tmp_path / "there", to="mxfp4")
    assert [row.note for row in report.quantized] == ["exact"]
    state = pw.load(tmp_path / "there")
    assert torch.equal(state["mlp.experts.gate_up_proj"].dequantize(), w.dequantize())
    assert torch.equal(state["mlp.experts.gate_up_proj_bias"], b)


def test_a_converted_model_runs_as_the_one_it_came_from(tmp_path: Path) -> None:
    model = Net()
    pw.quantize_(model, pw.SpecConfig(pw.QuantSpec(INT4, (32,), scale=F16)), filter_fn=lambda m, n: n in ("up", "down"))
    pw.save(model, tmp_path / "own")
    x = torch.randn(5, 128)
    expected = model.down(model.up(x))
    for to in ("compressed-tensors", "gptq", "awq"):
        pw.convert(tmp_path / "own", tmp_path / to, to=to)
        fresh = Net()
        pw.load(tmp_path / to, fresh, dtype=torch.float32)
        assert torch.equal(fresh.up.weight.dequantize(), model.up.weight.dequantize()), to
        torch.testing.assert_close(fresh.down(fresh.up(x)), expected, rtol=0.02, atol=0.02)  # kernels differ


def test_an_unknown_method_is_told(tmp_path: Path) -> None:
    pw.save({"a.weight": torch.zeros(2, 2)}, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "quarks"}}))
    with pytest.raises(CheckpointError, match=r"quant_method 'quarks'.*supported: compressed-tensors, gptq"):
        pw.open(tmp_path / "m")


@pytest.mark.parametrize("to", ["compressed-tensors", "gptq", "gptq_v2", "awq", "bitsandbytes"])
@pytest.mark.parametrize("spec", [ZEROS, INT4_32, INT8_ROW], ids=str)
def test_channels_in_another_order(to: str, spec: pw.QuantSpec, tmp_path: Path) -> None:
    """GPTQ keeps the order; elsewhere such a weight is quantized anew, in the order of its channels."""
    w = QT.from_float(torch.randn(64, 128, dtype=F16), spec).with_(perm=torch.randperm(128))
    pw.save({"up.weight": w}, tmp_path / "own")
    row = pw.convert(tmp_path / "own", tmp_path / "there", to=to).rows[0]
    value, after = w.dequantize(torch.float32), pw.load(tmp_path / "there")["up.weight"].dequantize(torch.float32)
    assert (row.note == "exact") == torch.equal(value, after)
    if to == "gptq_v2" and spec is ZEROS:
        assert row.note == "exact"
    else:
        assert float((value - after).norm()) < 0.2 * float(value.norm())


def test_a_static_activation_stays_where_the_weight_is_quantized_anew(tmp_path: Path) -> None:
    act = ActivationSpec(FP8_TENSOR, "static")
    w = QT.from_float(torch.randn(64, 128), pw.QuantSpec(E5M2, (32,)))
    w = QT(
        w.plain_parts()._replace(act_scale=torch.tensor([0.02])), w.spec.with_(layout="plain"), w.shape, w.dtype, act
    )
    pw.save({"up.weight": w}, tmp_path / "own")
    row = pw.convert(tmp_path / "own", tmp_path / "there", to="compressed-tensors").rows[0]
    assert row.note.startswith("requantized")
    after = pw.load(tmp_path / "there")["up.weight"]
    assert after.act == act
    assert after.act_scale.item() == w.act_scale.item()


@pytest.mark.parametrize("to", EXACT)
def test_a_float_model_is_no_model_of_another_library(to: str, tmp_path: Path) -> None:
    pw.save({"up.weight": torch.randn(64, 128)}, tmp_path / "own")
    with pytest.raises(CheckpointError, match=f"contains no quantized tensors to write as {to}; quantize it first"):
        pw.convert(tmp_path / "own", tmp_path / "there", to=to)
    assert not (tmp_path / "there").exists()


def test_a_job_is_another_one_once_the_config_reads_its_codes_otherwise(tmp_path: Path) -> None:
    saved(tmp_path / "own", ZEROS)
    pw.convert(tmp_path / "own", tmp_path / "there", to="gptq_v2")

    def stop(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pw.convert(tmp_path / "there", tmp_path / "back", progress=stop)
    text = (tmp_path / "there" / "config.json").read_text()
    (tmp_path / "there" / "config.json").write_text(text.replace('"gptq_v2"', '"gptq"'))
    with pytest.raises(CheckpointError, match="has another source, config"):
        pw.convert(tmp_path / "there", tmp_path / "back")


def test_the_report_says_that_inputs_are_no_longer_quantized(tmp_path: Path) -> None:
    """The weight is exact, the layer is not: the format needs a calibrated scale for NVFP4 inputs."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    pw.quantize_(model, pw.NVFP4DynamicActivationNVFP4WeightConfig())
    pw.save(model, tmp_path / "a")
    planned = pw.convert(tmp_path / "a", tmp_path / "b", to="compressed-tensors", dry_run=True)
    assert "inputs are not quantized: compressed-tensors needs" in planned.quantized[0].note
    (row,) = pw.convert(tmp_path / "a", tmp_path / "b", to="compressed-tensors").quantized
    assert row.note.startswith("exact weight; inputs are not quantized: ")
    with pw.open(tmp_path / "b") as checkpoint:
        assert checkpoint["0.weight"].act is None
