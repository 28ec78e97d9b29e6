"""Saved folders read by processes of transformers' own: without this package, and with no more than its import.

A process that does not know the method must give the right model, or an error that says what to import; never weights
that it made up.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.integrations.transformers import attach_quantizer, load_pretrained
from pennyweight.io.config_files import NO_SUCH_FILE
from tests import forked
from tests.integrations.small import IDS, assert_same_weights, llama, tokenizer

CONFIGS = {
    "int8": pw.Int8WeightOnlyConfig(),
    "int8-dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
    "int8-static": pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.02),
    "int4": pw.Int4WeightOnlyConfig(group_size=32),
    "int3": pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)),
    "uint4": pw.UIntXWeightOnlyConfig("uint4", 32),
    "8da4w": pw.Int8DynamicActivationIntxWeightConfig(torch.int4),
    "float8": pw.Float8WeightOnlyConfig(),
    "float8-dynamic": pw.Float8DynamicActivationFloat8WeightConfig(),
    "float8-static": pw.Float8StaticActivationFloat8WeightConfig(scale=torch.tensor(0.02)),
    "nf4": pw.NF4WeightOnlyConfig(),
    "mx": pw.MXWeightOnlyConfig(),
    "nvfp4": pw.NVFP4WeightOnlyConfig(),
    "fpx": pw.FPXWeightOnlyConfig(),
    "nvfp4-dynamic": pw.NVFP4DynamicActivationNVFP4WeightConfig(),
    "mx-dynamic": pw.MXDynamicActivationMXWeightConfig(),
    "codebook": pw.CodebookWeightOnlyConfig(bits=2, dim=4),
    "spec": pw.SpecConfig(pw.QuantSpec(pw.get_format("int5"), (16,), torch.float32)),
}
# What compressed-tensors has exactly, and how far its runtime's outputs are from ours: it computes in another order,
# and rounds dynamic inputs by another formula
COMPRESSED = {
    "int8": 1e-5, "int8-dynamic": 0.03, "int8-static": 1e-3, "int3": 1e-5, "8da4w": 0.03, "float8": 1e-5,
    "float8-dynamic": 0.03, "float8-static": 1e-3, "spec": 1e-5,
}  # fmt: skip
FAR = 0.3  # weights made up anew are 1.4 away

PROBE = """
import json, sys
before, after, folders, out = sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4]
if before: __import__(before)
import torch, transformers
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, pipeline
from safetensors.torch import load_file
if after: __import__(after)
ids = torch.arange(18).view(2, 9) * 7 % 200 + 3
READERS = {
    "AutoModelForCausalLM": lambda f: AutoModelForCausalLM.from_pretrained(f)(ids).logits,
    "LlamaForCausalLM": lambda f: LlamaForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits,
    "AutoModel": lambda f: AutoModel.from_pretrained(f)(ids).last_hidden_state,
    "pipeline": lambda f: pipeline("text-generation", model=f, device="cpu").model(ids).logits,
}
said = {}
for folder in folders:
    name = folder.rpartition("/")[2]
    for reader in list(READERS) if name in ("int8", "int4", "int8-compressed") else list(READERS)[:1]:
        try:
            with torch.no_grad():
                got = READERS[reader](folder)
            expected = load_file(folder + "/expected")["hidden" if reader == "AutoModel" else "logits"]
            said[f"{name} {reader}"] = [float((got - expected).norm() / expected.norm()), ""]
        except Exception as e:
            said[f"{name} {reader}"] = [None, f"{type(e).__name__}: {e}"]
said["ours"] = sorted(m for m in sys.modules if m.split(".")[0] == "pennyweight")
json.dump(said, open(out, "w"))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each config, one more where compressed-tensors has it; outputs of the saved model beside them."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("saved")
    for name, config in CONFIGS.items():
        model = llama(vocab_size=264, num_hidden_layers=1)
        pw.quantize_(model.model, config)
        for format in ("pennyweight", "compressed-tensors"):
            if format == "pennyweight" or name in COMPRESSED:
                folder = root / (name if format == "pennyweight" else f"{name}-compressed")
                attach_quantizer(model, config, save_as=format).save_pretrained(folder)
                tokenizer(folder)
                with torch.no_grad():
                    hidden, logits = model.model(IDS).last_hidden_state, model(IDS).logits
                save_file({"hidden": hidden, "logits": logits}, folder / "expected")
    return root


def run(root: Path, before: str = "", after: str = "") -> dict[str, Any]:
    """What every reader made of every folder in a new process: (relative distance of the outputs or None, error)."""
    out = root / f"{before}-{after}.json"
    names = ",".join(sorted(str(p) for p in root.iterdir() if p.is_dir()))
    command = ["-c", PROBE, before, after, names, str(out)]
    done = forked.run(command, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def plain(folders: Path) -> dict[str, Any]:
    said = run(folders)
    assert said.pop("ours") == []
    return said


def test_every_config_of_the_table_is_here() -> None:
    page = (Path(pw.__file__).parents[1] / "docs" / "configs.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+Config)\(", page.partition("## Short names")[0]))
    assert len(named) > 12
    assert named == {type(config).__name__ for config in CONFIGS.values()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_process_that_does_not_know_us_stops_and_says_what_to_import(name: str, plain: dict[str, Any]) -> None:
    readers = {key: said for key, said in plain.items() if key.split(" ")[0] == name}
    assert readers
    for reader, (distance, error) in readers.items():
        assert distance is None, reader
        assert "import pennyweight" in error, reader


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
@pytest.mark.parametrize("name", COMPRESSED)
def test_what_compressed_tensors_has_is_the_saved_model_without_us(name: str, plain: dict[str, Any]) -> None:
    readers = {key: said for key, said in plain.items() if key.split(" ")[0] == f"{name}-compressed"}
    assert readers
    for reader, (distance, error) in readers.items():
        assert error == "", reader
        assert distance < COMPRESSED[name] < FAR, reader


@pytest.mark.parametrize("name", COMPRESSED)
def test_and_with_us_the_saved_weights_bit_for_bit(name: str, folders: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load_pretrained(AutoModelForCausalLM, folders / f"{name}-compressed")
    expected = load_pretrained(AutoModelForCausalLM, folders / name)
    for m in (model, expected):
        for p in m.parameters():
            if isinstance(p, pw.AffineQuantizedTensor) and p.act is not None:
                assert p.act.eps is None or p.act.eps < 1e-6  # the one setting that the format has no word for
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    if name not in ("int8-dynamic", "int8-static"):  # those have an eps
        assert_same_weights(model, expected)


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.exhaustive)])
def test_import_pennyweight_is_enough(when: str, folders: Path) -> None:
    said = run(folders, **{when: "pennyweight"})
    assert said.pop("ours")
    for reader, (distance, error) in said.items():
        assert error == "", reader
        allowed = COMPRESSED[reader.partition("-compressed")[0]] if "-compressed" in reader else 0.0
        assert distance <= allowed, reader


# -- what is written -------------------------------------------------------------------------------------------------


def test_only_folders_in_our_format_are_marked(folders: Path, tmp_path: Path) -> None:
    config = json.loads((folders / "int8" / "config.json").read_text())
    assert config["transformers_weights"] == NO_SUCH_FILE
    assert "import pennyweight" in NO_SUCH_FILE
    assert "transformers_weights" not in json.loads((folders / "int8-compressed" / "config.json").read_text())

    pw.convert(folders / "int8", tmp_path / "float", to="float")
    pw.convert(folders / "int8", tmp_path / "compressed", to="compressed-tensors")
    pw.quantize_checkpoint(tmp_path / "float", tmp_path / "ours", CONFIGS["int8"], skip=("lm_head",))
    marked = {n: "transformers_weights" in json.loads((tmp_path / n / "config.json").read_text()) for n in
              ("float", "compressed", "ours")}  # fmt: skip
    assert marked == {"float": False, "compressed": False, "ours": True}


def test_pw_save_marks_a_config_that_lies_there(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = llama(num_hidden_layers=1)
    model.config.save_pretrained(tmp_path)
    pw.save(model, tmp_path)  # float: nothing to say
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    pw.quantize_(model.model, CONFIGS["int8"])
    pw.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["transformers_weights"] == NO_SUCH_FILE
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)

    (tmp_path / "other").mkdir()
    for text in ('{"_class_name": "UNet2DModel"}', "not JSON", "[]"):
        (tmp_path / "other" / "config.json").write_text(text)
        pw.save(model, tmp_path / "other")
        assert (tmp_path / "other" / "config.json").read_text() == text


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - COMPRESSED.keys()))
def test_what_compressed_tensors_has_not_is_refused(name: str, tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    pw.quantize_(model.model, CONFIGS[name])
    attach_quantizer(model, save_as="compressed-tensors")
    with pytest.raises(pw.CheckpointError, match=r"q_proj.weight.*cannot be saved as compressed-tensors: .*own format"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_embeddings_and_ties_under_compressed_tensors(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = llama(num_hidden_layers=1, tie_word_embeddings=True)
    pw.quantize_(model.model, CONFIGS["int8"])
    attach_quantizer(model, save_as="compressed-tensors").save_pretrained(tmp_path)
    again = load_pretrained(AutoModelForCausalLM, tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert_same_weights(again, model)

    model = llama(num_hidden_layers=1)
    pw.quantize_(model, pw.FqnToConfig({"model.embed_tokens": CONFIGS["int8"], "_default": None}))
    with pytest.raises(
        pw.CheckpointError, match=r"embed_tokens.weight.*supports only quantized weights of linear layers"
    ):
        attach_quantizer(model, save_as="compressed-tensors").save_pretrained(tmp_path)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="save_as must be one of pennyweight, compressed-tensors, got 'gptq'"):
        pw.PennyweightConfig("int8", save_as="gptq")
