"""PEFT on quantized weights: training, adapters on disk, merging and what it costs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM

import pennyweight as pw
from pennyweight.integrations.peft import merge_and_report, merged
from tests.integrations import writers
from tests.integrations.small import IDS, float_folder, llama, quantized
from tests.integrations.writers import Writer

CONFIGS = {
    "int8": pw.Int8WeightOnlyConfig(),
    "int8-dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
    "int4": pw.Int4WeightOnlyConfig(32),
    "8da4w": pw.Int8DynamicActivationInt4WeightConfig(),
    "nf4": pw.NF4WeightOnlyConfig(),
    "float8": pw.Float8WeightOnlyConfig(),
    "float8-dynamic": pw.Float8DynamicActivationFloat8WeightConfig(),
}
TARGETS = ["q_proj", "v_proj", "down_proj"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # PEFT 0.21 with transformers 5.23
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return float_folder(tmp_path_factory.mktemp("float"))


def base(folder: Path, config: pw.AOBaseConfig, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=pw.PennyweightConfig(config))


def trained(model: Any, steps: int = 12, **kwargs: Any) -> tuple[Any, list[float]]:
    torch.manual_seed(1)
    lora = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **kwargs))
    optimizer = torch.optim.Adam([p for p in lora.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = lora(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return lora.eval(), losses


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def codes(model: Any) -> list[torch.Tensor]:
    return [w.dequantize() for w in quantized(model).values()]


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_trains_is_saved_and_loaded_and_merges(name: str, folder: Path, tmp_path: Path) -> None:
    lora, losses = trained(base(folder, CONFIGS[name]))
    assert losses[-1] < 0.9 * losses[0]
    said = logits(lora)
    lora.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(folder, CONFIGS[name]), tmp_path)
    assert torch.equal(logits(again), said)
    plain = lora.merge_and_unload()
    assert len(quantized(plain)) == 14
    without = logits(base(folder, CONFIGS[name]))
    assert distance(logits(plain), said) < 0.5 * distance(without, said)  # the adapter is in there


@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "float8-dynamic"])
def test_peft_prepares_half_precision_models_for_training(name: str, folder: Path) -> None:
    """It makes all parameters float32 by ``param.data = param.data.float()``."""
    model = prepare_model_for_kbit_training(base(folder, CONFIGS[name], torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    _, losses = trained(model)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("name", "dora"), [*((name, False) for name in CONFIGS), ("int8", True), ("nf4", True)])
@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # DoRA adds to a dequantized copy at each step
def test_the_report_compares_with_the_exact_sum(name: str, dora: bool, folder: Path) -> None:
    lora, _ = trained(base(folder, CONFIGS[name]), use_dora=dora)
    exact = {}
    for key, layer in lora.named_modules():
        if hasattr(layer, "lora_A"):
            w = layer.get_base_layer().weight.dequantize()
            delta = layer.get_delta_weight("default")
            if dora:
                magnitude = layer.lora_magnitude_vector["default"].weight
                total = w + delta
                exact[key] = total * (magnitude / total.norm(dim=1)).unsqueeze(1)
            else:
                exact[key] = w + delta
    plain, report = merge_and_report(lora)
    assert {r.name for r in report.rows} == exact.keys()
    weights = {n: p for n, p in plain.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)}
    for row in report.rows:
        w = weights[row.name.removeprefix("base_model.model.") + ".weight"]
        assert row.sqnr == pytest.approx(w.error(exact[row.name].detach()), abs=0.05)
        assert row.note.startswith("default: change kept at ")
    least = {"int8": 38, "int8-dynamic": 38, "float8": 25, "float8-dynamic": 25}.get(name, 14)
    assert report.check(min_sqnr=least) is report
    with pytest.raises(ValueError, match="weights are below 90 dB"):
        report.check(min_sqnr=90)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_a_coarse_base_would_round_off_goes_into_finer_weights(dtype: torch.dtype, folder: Path) -> None:
    one, two = (trained(base(folder, CONFIGS["nf4"], dtype))[0] for _ in range(2))
    said, before = logits(one), quantized(one)
    coarse, _ = merge_and_report(one)
    plain, report = merge_and_report(two, config=pw.Int8WeightOnlyConfig())
    assert distance(logits(plain), said) < 0.2 * distance(logits(coarse), said)
    assert {w.dtype for w in quantized(plain).values()} == {dtype}
    changed = [w for w in quantized(plain).values() if w.spec.format.name == "int8"]
    assert len(changed) == len(report.quantized) == 6
    assert len(quantized(plain)) == len(before)  # where no adapter was, nothing has changed
    for row in report.quantized:
        assert row.sqnr is not None
        assert row.sqnr > 38
        assert float(row.note.removeprefix("change kept at ").removesuffix(" dB")) > 5


def test_it_merges_as_peft_does(folder: Path) -> None:
    one, two = (trained(base(folder, CONFIGS["int4"]))[0] for _ in range(2))
    plain, _ = merge_and_report(one)
    for a, b in zip(codes(plain), codes(two.merge_and_unload()), strict=True):
        assert distance(a, b) < 0.01


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_merging_for_a_while_is_undone_exactly(name: str, folder: Path) -> None:
    model = base(folder, CONFIGS[name])
    before = codes(model)
    lora, _ = trained(model)
    said = logits(lora)
    with merged(lora) as report:
        assert len(report.rows) == 6
        assert distance(logits(lora), said) > 0
        assert any(not torch.equal(a, b) for a, b in zip(codes(lora), before, strict=True))
        with pytest.raises(ValueError, match=r"\['default'\] already merged; call unmerge_adapter"):
            merge_and_report(lora)
    assert all(torch.equal(a, b) for a, b in zip(codes(lora), before, strict=True))
    assert torch.equal(logits(lora), said)
    lora.merge_adapter()
    lora.unmerge_adapter()  # PEFT's own way rounds twice
    assert distance(logits(lora), said) > 0


def test_layers_that_are_float_are_merged_and_unmerged_too(folder: Path) -> None:
    table = pw.FqnToConfig({"*.q_proj": pw.Int8WeightOnlyConfig()})
    lora, _ = trained(base(folder, table))
    said = logits(lora)
    with merged(lora) as report:
        assert len(report.rows) == 2
        assert distance(logits(lora), said) < 0.02
    assert torch.allclose(logits(lora), said, atol=1e-4)


def test_a_change_too_small_for_the_codes_is_told(folder: Path) -> None:
    lora, _ = trained(base(folder, CONFIGS["int4"]), steps=1)
    for name, p in lora.named_parameters():
        if "lora_B" in name:
            p.data.mul_(1e-3)
    _, report = merge_and_report(lora)
    kept = [float(r.note.split()[-2]) for r in report.rows]
    assert max(kept) < 3


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def of_pretrained(folder: Path, other: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def merge_then_quantize(config: pw.AOBaseConfig) -> Any:
    merged = get_peft_model(llama(), LORA).merge_and_unload()
    pw.quantize_(merged, config)
    return merged


def quantize_then_merge(config: pw.AOBaseConfig) -> Any:
    model = llama()
    pw.quantize_(model, config)
    return get_peft_model(model, LORA).merge_and_unload()


def adapter(folder: Path, other: Any) -> Any:
    """The adapter that was written, on a base quantized the same way."""
    return PeftModel.from_pretrained(other, folder)


def quantize_then_adapt(config: pw.AOBaseConfig) -> Any:
    model = llama()
    pw.quantize_(model, config)
    torch.manual_seed(5)
    return get_peft_model(model, LORA)


MODELS = {
    "merged, then quantized": (merge_then_quantize, Writer(lambda m, d: m.save_pretrained(d), of_pretrained)),
    "quantized, then merged": (quantize_then_merge, Writer(lambda m, d: m.save_pretrained(d), of_pretrained)),
    "adapter on a quantized base": (quantize_then_adapt, Writer(lambda m, d: m.save_pretrained(d), adapter)),
}


@pytest.mark.parametrize("config", ["int8", "int8-dynamic", "int4", "nf4"])
@pytest.mark.parametrize(("make", "writer"), MODELS.values(), ids=MODELS)
def test_writers(make: Any, writer: Writer, config: str, tmp_path: Path) -> None:
    other = llama()
    pw.quantize_(other, writers.CONFIGS[config])
    writers.check(writer, make(writers.CONFIGS[config]), other, tmp_path, logits)


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.up(x)))


@pytest.mark.parametrize("name", ["nf4", "int8", "int4"])
def test_a_module_that_is_saved_whole_is_trained_as_floats(name: str, tmp_path: Path) -> None:
    """PEFT copies ``modules_to_save`` and trains the copy, in which codes would never change."""
    model, float_model = Classifier(), Classifier()
    pw.quantize_(model, CONFIGS[name])
    config = LoraConfig(r=4, target_modules=["up"], modules_to_save=["head"], init_lora_weights=False)
    lora, exact = get_peft_model(model, config), get_peft_model(float_model, config)
    wrapper = lora.base_model.model.head
    assert isinstance(wrapper.original_module.weight, pw.AffineQuantizedTensor)
    start = wrapper.modules_to_save["default"].weight
    assert type(start) is torch.nn.Parameter
    assert start.requires_grad
    assert torch.equal(start, wrapper.original_module.weight.dequantize())
    before = start.detach().clone()
    x, y = torch.randn(64, 32), torch.randint(8, (64,))
    losses = []
    for m in (lora, exact):
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(30):
            loss = torch.nn.functional.cross_entropy(m(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert not torch.equal(start, before)
    assert abs(losses[0] - losses[1]) < 0.5 * (2.08 - losses[1])  # ln 8 is where it starts
    lora.save_pretrained(tmp_path)
    fresh = Classifier()
    pw.quantize_(fresh, CONFIGS[name])
    with torch.no_grad():
        assert torch.equal(PeftModel.from_pretrained(fresh, tmp_path)(x), lora.eval()(x))


def test_adapters_are_not_quantized() -> None:
    lora = get_peft_model(Classifier(), LoraConfig(r=4, target_modules=["up"], modules_to_save=["head"]))
    trainable = [n for n, p in lora.named_parameters() if p.requires_grad]
    report = pw.quantize_(lora, CONFIGS["nf4"], lambda module, name: isinstance(module, torch.nn.Linear))
    assert [n for n, p in lora.named_parameters() if p.requires_grad] == trainable
    assert {r.name for r in report.quantized} == {
        "base_model.model.up.base_layer.weight", "base_model.model.head.original_module.weight",
    }  # fmt: skip
    notes = {r.name: r.note for r in report.skipped}
    assert "part of a PEFT adapter" in notes["base_model.model.up.lora_A.default.weight"]
    assert "part of a PEFT adapter" in notes["base_model.model.head.modules_to_save.default.weight"]
    key = "base_model.model.up.lora_A.default.weight"
    named = pw.quantize_(lora, pw.FqnToConfig({key: CONFIGS["int8"]}))  # asked for by name
    assert [r.name for r in named.quantized] == [key]


def test_a_model_without_adapters_is_refused_by_name() -> None:
    for config in (None, CONFIGS["int8"]):
        with pytest.raises(ValueError, match="Classifier has no adapters to merge"):
            merge_and_report(Classifier(), config=config)
