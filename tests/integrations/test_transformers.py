"""transformers: quantized while loading, saved, loaded, saved again; the same numbers as quantize_ at every step."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel, MixtralConfig, MixtralForCausalLM

import pennyweight as pw
from pennyweight.integrations.transformers import PennyweightConfig, attach_quantizer
from pennyweight.integrations.transformers import quantizer as quantizer_file
from pennyweight.io.manifest import VERSION
from tests import forked
from tests.integrations.small import IDS, assert_same_weights, bits, float_folder, llama, quantized, tokens

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")

CONFIGS = {
    "int8": pw.Int8WeightOnlyConfig(),
    "int8-dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
    "int8-static": pw.Int8StaticActivationInt8WeightConfig(
        act_quant_scale=0.02, act_quant_zero_point=3, act_mapping_type=pw.MappingType.ASYMMETRIC
    ),
    "int4": pw.Int4WeightOnlyConfig(32),
    "8da4w": pw.Int8DynamicActivationInt4WeightConfig(),
    "uint3": pw.UIntXWeightOnlyConfig("uint3", 32),
    "float8": pw.Float8WeightOnlyConfig(),
    "nf4": pw.NF4WeightOnlyConfig(),
    "nvfp4": pw.NVFP4WeightOnlyConfig(),
    "mxfp8": pw.MXDynamicActivationMXWeightConfig(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return float_folder(tmp_path_factory.mktemp("float"))


def by_hand(config: pw.AOBaseConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Loaded as float, then quantized but for the output layer."""
    model = llama().to(dtype)
    pw.quantize_(model.model, config)
    return model


def assert_same_files(a: Path, b: Path) -> None:
    """Not byte for byte: safetensors writes metadata in no order."""
    with safe_open(a, "pt") as one, safe_open(b, "pt") as two:
        assert one.metadata() == two.metadata()
        assert one.keys() == two.keys()
        for name in one.keys():  # noqa: SIM118
            x, y = one.get_tensor(name), two.get_tensor(name)
            assert x.dtype == y.dtype
            assert torch.equal(bits(x), bits(y))


@pytest.mark.parametrize("name", CONFIGS)
def test_on_load_saved_loaded_and_saved_again(name: str, folder: Path, tmp_path: Path) -> None:
    config = CONFIGS[name]
    expected = by_hand(config)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=PennyweightConfig(config))
    assert len(quantized(model)) == 14
    assert_same_weights(model, expected)
    said = tokens(model)
    assert said == tokens(expected)

    model.save_pretrained(tmp_path / "once")
    assert_same_weights(pw.load(tmp_path / "once", llama()), expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "once")
    assert_same_weights(again, expected)
    assert tokens(again) == said
    assert again.config.quantization_config.config == config

    again.save_pretrained(tmp_path / "twice")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()
    assert_same_files(tmp_path / "once" / "model.safetensors", tmp_path / "twice" / "model.safetensors")

    again.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_same_weights(pw.load(tmp_path / "shards", llama()), expected)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "shards"), expected)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}])
def test_device_maps(device_map: Any, folder: Path, tmp_path: Path) -> None:
    config = PennyweightConfig("int8")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=device_map)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert_same_weights(again, by_hand(pw.Int8WeightOnlyConfig()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_settled_before_the_rounding(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    config = pw.Int4WeightOnlyConfig(32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=PennyweightConfig(config))
    assert_same_weights(model, by_hand(config, dtype))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(again, model)
    assert tokens(again) == tokens(model)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    weight, stored = other.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight.codes, stored.codes)
    assert torch.isfinite(other(IDS).logits).all()


def test_the_report_is_that_of_quantize_(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=PennyweightConfig("int8"))
    report = model.hf_quantizer.report
    expected = {r.name: r for r in pw.quantize_(llama().model, pw.Int8WeightOnlyConfig()).quantized}
    assert {r.name.removeprefix("model.") for r in report.quantized} == expected.keys()
    for row in report.quantized:
        other = expected[row.name.removeprefix("model.")]
        assert (row.sqnr, row.bytes_after, row.kernel) == (other.sqnr, other.bytes_after, other.kernel)
    notes = {r.name: r.note for r in report.skipped}
    assert notes["lm_head.weight"] == "excluded by transformers' defaults; modules_to_not_convert=[] quantizes it"


# -- what is quantized -------------------------------------------------------------------------------------------------


def test_a_short_name_a_group_size_and_skip_mean_the_same_everywhere(folder: Path, tmp_path: Path) -> None:
    """In quantize_, on load, in quantize_checkpoint and on the command line."""
    asked = PennyweightConfig("int4", group_size=32, skip=["lm_head", "*.down_proj"])
    model = llama()
    pw.quantize_(model, asked)
    by_hand = llama()
    pw.quantize_(by_hand, pw.Int4WeightOnlyConfig(32), skip=["lm_head", "*.down_proj"])
    pw.quantize_checkpoint(folder, tmp_path / "files", pw.Int4WeightOnlyConfig(32), skip=["lm_head", "*.down_proj"])
    options = ("--config", "int4", "--group-size", "32", "--skip", "lm_head", "--skip", "*.down_proj")
    command = ["-m", "pennyweight", "quantize", str(folder), str(tmp_path / "cli"), *options]
    forked.run(command, check=True)
    on_load = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked)
    done = [name for name, p in model.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)]
    assert "model.layers.0.mlp.up_proj.weight" in done
    assert not any("down_proj" in name or "lm_head" in name for name in done)
    assert [r.name for r in pw.plan(llama(), asked).active] == done
    pw.quantize_checkpoint(folder, tmp_path / "asked", asked)
    for other in (
        by_hand,
        on_load,
        *map(AutoModelForCausalLM.from_pretrained, (tmp_path / "files", tmp_path / "asked", tmp_path / "cli")),
    ):
        assert_same_weights(other, model)
    on_load.save_pretrained(tmp_path / "saved")
    said = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert (said["config"]["group_size"], said["skip"]) == (32, ["lm_head", "*.down_proj"])
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


def test_wrong_skips_and_group_sizes(folder: Path) -> None:
    with pytest.raises(ValueError, match="skip must be a list of names, got 'lm_head'"):
        PennyweightConfig("int4", skip="lm_head")
    with pytest.raises(ValueError, match="group_size needs a config given by its short name"):
        PennyweightConfig(pw.Int4WeightOnlyConfig(), group_size=32)
    with pytest.raises(ValueError, match="group_size=32 cannot be used with fp6"):
        PennyweightConfig("fp6", group_size=32)
    with pytest.raises(pw.PlanError, match=r"skip='lm_haed' matches no module or parameter \(did you mean 'lm_head'"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=PennyweightConfig("int4", skip=["lm_haed"]))
    with pytest.raises(pw.PlanError, match="PennyweightConfig already holds skip"):
        pw.quantize_(llama(), PennyweightConfig("int4"), skip=["lm_head"])


def loaded(folder: Path, config: Any, left: Any = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=PennyweightConfig(config, left))


def test_the_output_layer_is_left_unless_it_is_asked_for(folder: Path) -> None:
    assert "lm_head.weight" not in quantized(loaded(folder, "int8"))
    assert "lm_head.weight" in quantized(loaded(folder, "int8", []))
    table = {"_default": pw.Int8WeightOnlyConfig()}
    assert "lm_head.weight" not in quantized(loaded(folder, pw.FqnToConfig(table)))
    assert "lm_head.weight" in quantized(
        loaded(folder, pw.FqnToConfig({**table, "lm_head": pw.Int8WeightOnlyConfig()}))
    )
    some = quantized(loaded(folder, "int8", ["lm_head", "mlp.down_proj"]))
    assert len(some) == 12
    assert not any("down_proj" in name for name in some)


def test_names_and_patterns_choose_as_quantize_does(folder: Path, tmp_path: Path) -> None:
    config = pw.FqnToConfig(
        {
            "model.layers.0.mlp.up_proj": None,
            "re:.*attn.*": pw.Int4WeightOnlyConfig(32),
            "*.1.mlp.*": pw.Float8WeightOnlyConfig(),
            "model.embed_tokens": pw.Int8WeightOnlyConfig(),
            "_default": pw.Int8WeightOnlyConfig(),
        }
    )
    expected = llama()
    pw.quantize_(expected, pw.FqnToConfig({"lm_head": None, **config.fqn_to_config}))
    model = loaded(folder, config)
    assert_same_weights(model, expected)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(again, expected)
    assert again.config.quantization_config.config == config


@pytest.mark.parametrize("asked", [False, True])
def test_tied_weights_stay_tied(asked: bool, tmp_path: Path) -> None:
    float_folder(tmp_path / "float", tie_word_embeddings=True)
    model = loaded(tmp_path / "float", "int8", [] if asked else None)
    for _ in range(3):
        head, table = model.lm_head.weight, model.model.embed_tokens.weight
        assert head is table
        assert isinstance(head, pw.AffineQuantizedTensor) is asked
        said = tokens(model)
        model.save_pretrained(tmp_path / "saved")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert tokens(model) == said
    assert pw.load(tmp_path / "saved", llama(tie_word_embeddings=True)).lm_head.weight is not None
    held = pw.load(tmp_path / "saved")
    assert held["lm_head.weight"] is held["model.embed_tokens.weight"]


def test_an_encoder(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path / "float")
    quick = AutoModel.from_pretrained(tmp_path / "float", quantization_config=PennyweightConfig("int8-dynamic", []))
    pw.quantize_(model, pw.Int8DynamicActivationInt8WeightConfig())
    assert_same_weights(quick, model)
    quick.save_pretrained(tmp_path / "saved")
    again = AutoModel.from_pretrained(tmp_path / "saved")
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)


def test_experts_that_transformers_merges_as_it_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "float")
    with safe_open(tmp_path / "float" / "model.safetensors", "pt") as file:
        assert any("experts.3.w" in name for name in file.keys())  # noqa: SIM118
    table = pw.FqnToConfig({"*.experts.*": pw.Int8WeightOnlyConfig(), "*.self_attn.*": pw.Int4WeightOnlyConfig(32)})
    quick = loaded(tmp_path / "float", table)
    pw.quantize_(model, table)
    assert_same_weights(quick, model)
    quick.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights(again, model)
    again.save_pretrained(tmp_path / "again", max_shard_size="8KB")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)
    ids = IDS % 99
    assert torch.equal(again(ids).logits, model(ids).logits)


# -- folders of ours ---------------------------------------------------------------------------------------------------


def test_a_folder_of_quantize_checkpoint_loads(folder: Path, tmp_path: Path) -> None:
    config = pw.Int4WeightOnlyConfig(32)
    pw.quantize_checkpoint(folder, tmp_path, config, skip=("lm_head",), max_shard_bytes=50_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(model, by_hand(config))
    said = model.config.quantization_config
    assert (said.config, said.modules_to_not_convert) == (config, ["lm_head"])
    model.save_pretrained(tmp_path / "again")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)


def test_both_writers_say_the_same(folder: Path, tmp_path: Path) -> None:
    pw.quantize_checkpoint(folder, tmp_path / "a", pw.Int8WeightOnlyConfig(), skip=("lm_head",))
    loaded(folder, "int8", ["lm_head"]).save_pretrained(tmp_path / "b")
    entries = [json.loads((tmp_path / n / "config.json").read_text())["quantization_config"] for n in "ab"]
    assert entries[0] == entries[1]


def test_a_model_quantized_by_hand_is_saved_once_it_is_told(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    pw.quantize_(model, pw.NF4WeightOnlyConfig())
    attach_quantizer(model, pw.NF4WeightOnlyConfig()).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(again, model)
    assert again.config.quantization_config.config == pw.NF4WeightOnlyConfig()
    again.dequantize()
    assert not hasattr(again.config, "quantization_config")


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_dequantize(name: str, folder: Path, tmp_path: Path) -> None:
    model = loaded(folder, name)
    with torch.no_grad():
        said = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.dequantize()
    assert quantized(again) == {}
    assert all(p.requires_grad for p in again.parameters())
    assert torch.allclose(again(IDS).logits, said, atol=1e-4)
    again.save_pretrained(tmp_path / "float")
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())
    model.dequantize(torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_reach_the_input(name: str, folder: Path) -> None:
    model = loaded(folder, CONFIGS[name])
    assert model.hf_quantizer.is_trainable
    x = model.model.embed_tokens(IDS).detach().requires_grad_()
    model(inputs_embeds=x, labels=IDS).loss.backward()
    assert x.grad is not None
    assert float(x.grad.abs().max()) > 0


def test_many_layers_are_loaded_in_linear_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 58
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers, "num_key_value_heads": 4}
    model = llama(**small)
    pw.quantize_(model.model, pw.Int8WeightOnlyConfig())
    attach_quantizer(model).save_pretrained(tmp_path)
    calls: dict[str, int] = {}

    def counted(name: str) -> None:
        function = getattr(quantizer_file, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(quantizer_file, name, wrapper)

    for name in ("open_files", "check_data", "build", "slots_of", "stored_parts"):
        counted(name)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(again, model)
    weights = 7 * layers
    assert calls["open_files"] == calls["slots_of"] == 1
    assert calls["check_data"] == calls["build"] == weights
    assert calls["stored_parts"] == 2 * weights


# -- errors ------------------------------------------------------------------------------------------------------------


def changed(folder: Path, dst: Path, **changes: torch.Tensor) -> Path:
    """A copy of a folder with some tensors changed."""
    dst.mkdir()
    (dst / "config.json").write_bytes((folder / "config.json").read_bytes())
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file({**tensors, **{k.replace("__", "."): v for k, v in changes.items()}}, dst / "model.safetensors", metadata)
    return dst


UP = "model__layers__0__mlp__up_proj__weight"


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (torch.full((128, 64), float("nan")), "8192 of 8192 values are NaN or inf"),
        (torch.zeros(64, 64), r"the model has shape \[128, 64\], the checkpoint \[64, 64\]"),
    ],
)
def test_weights_that_cannot_be_quantized(weight: torch.Tensor, says: str, folder: Path, tmp_path: Path) -> None:
    bad = changed(folder, tmp_path / "bad", **{UP: weight})
    with pytest.raises(ValueError, match=f"model.layers.0.mlp.up_proj.weight: {says}"):
        loaded(bad, "int8")


def test_codes_of_another_library_are_not_taken_for_floats(folder: Path, tmp_path: Path) -> None:
    bad = changed(folder, tmp_path / "bad", **{UP: torch.zeros(128, 64, dtype=torch.int8)})
    with pytest.raises(ValueError, match=r"up_proj.weight is torch.int8, so another library may have quantized it"):
        loaded(bad, "int8")


def test_a_damaged_part_is_named(folder: Path, tmp_path: Path) -> None:
    loaded(folder, "int8").save_pretrained(tmp_path / "saved")
    scale = torch.full((128, 1), float("inf"))
    bad = changed(tmp_path / "saved", tmp_path / "bad", **{f"{UP}__scale": scale})
    with pytest.raises(pw.CheckpointError, match=r"up_proj.weight.scale: 128 of 128 values are NaN or inf"):
        AutoModelForCausalLM.from_pretrained(bad)


def test_folders_that_are_not_what_is_said(folder: Path, tmp_path: Path) -> None:
    loaded(folder, "int8").save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    entry = config.pop("quantization_config")
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is already quantized .*omit quantization_config"):
        loaded(tmp_path / "saved", "int8")

    liar = changed(folder, tmp_path / "liar")
    (liar / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    with pytest.raises(ValueError, match="the files have no quantized tensors"):
        AutoModelForCausalLM.from_pretrained(liar)
    for change, says in [
        ({"version": VERSION + 1}, f"version {VERSION + 1}; this release reads {VERSION}"),
        ({"codec": "x"}, r"\['codec'\], which this release does not know"),
        ({"config": {"type": "Int1WeightOnlyConfig"}}, "this release does not know the type"),
    ]:
        (liar / "config.json").write_text(json.dumps({**config, "quantization_config": {**entry, **change}}))
        with pytest.raises(ValueError, match=says):
            AutoModelForCausalLM.from_pretrained(liar)


def test_other_methods_and_bad_settings(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"quant_method is 'gptq'.*load_pretrained"):
        PennyweightConfig.from_dict({"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="unknown config 'int44'"):
        PennyweightConfig("int44")
    with pytest.raises(ValueError, match="config must be a config such as"):
        PennyweightConfig(8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a list of names, got 'lm_head'"):
        PennyweightConfig("int8", "lm_head")
    with pytest.raises(ValueError, match="on_indivisible must be one of"):
        PennyweightConfig("int8", on_indivisible="round")
    with pytest.raises(ValueError, match="specify how to quantize"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=PennyweightConfig())
    with pytest.raises(ValueError, match="cannot be offloaded to disk"):
        AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=PennyweightConfig("int8"), device_map={"model": "cpu", "lm_head": "disk"}
        )
    with pytest.raises(ValueError, match="nothing would be quantized"):
        loaded(folder, "int8", ["model", "lm_head"])
    with pytest.raises(ValueError, match=r"nothing would be quantized.*modules_to_not_convert=\[\]"):
        loaded(folder, pw.FqnToConfig({"_default": pw.Int8WeightOnlyConfig()}), ["model", "lm_head"])
    with pytest.raises(ValueError, match="matches no module or parameter"):
        loaded(folder, pw.FqnToConfig({"model.layers.9.mlp.up_proj": pw.Int8WeightOnlyConfig()}))


def test_a_config_of_ones_own_quantizes_and_is_null_in_the_file(folder: Path, tmp_path: Path) -> None:
    class Mine(pw.Int8WeightOnlyConfig):
        pass

    model = loaded(folder, Mine())
    assert_same_weights(model, by_hand(pw.Int8WeightOnlyConfig()))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.quantization_config.config is None
    assert_same_weights(again, model)


def test_the_name_at_the_top_and_registering_twice() -> None:
    assert pw.PennyweightConfig is PennyweightConfig
    assert "PennyweightConfig" in dir(pw)
    assert "PennyweightConfig" not in pw.__all__
    module = importlib.import_module("pennyweight.integrations.transformers.adapter")
    module.register()
    assert dict(PennyweightConfig("int4", on_indivisible="skip")) == {
        "quant_method": "pennyweight", "version": 1, "config": {"type": "Int4WeightOnlyConfig"},
        "modules_to_not_convert": None, "on_indivisible": "skip",
    }  # fmt: skip
