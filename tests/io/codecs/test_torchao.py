"""pw.open and pw.load on checkpoints of torchao's: the flattened safetensors of 0.18, and pickles by consent."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError
from pennyweight.io.codecs.torchao.flattened_safetensors import flatten_tensor_state_dict, unflatten_tensor_state_dict
from pennyweight.io.codecs.torchao.reading import SAFE_GLOBALS
from tests import forked
from tests.io.test_native_format import assert_same

GOLDEN = Path(__file__).parents[2] / "golden"
STATES = GOLDEN / "torchao_0.18_states.safetensors"


def flattened() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What torchao 0.18 wrote, as a file of its own would hold it."""
    with safe_open(STATES, "pt") as file:
        metadata = file.metadata()
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors, metadata = flattened()
    names = json.loads(metadata["tensor_names"])
    prefixes = [n.rpartition(".")[0] + "._" + n.rpartition(".")[2] + "_" for n in names]
    mine = {k: t for k, t in tensors.items() if k in names or any(k.startswith(p) for p in prefixes)}
    kept = {k: v for k, v in metadata.items() if k == "tensor_names" or k in names}
    save_file(mine, tmp_path / "model.safetensors", {**kept, "format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    return tmp_path


def test_flattened_weights_are_those_of_unflatten(folder: Path) -> None:
    tensors, metadata = flattened()
    expected, _ = unflatten_tensor_state_dict(tensors, metadata)
    with pw.open(folder) as checkpoint:
        assert checkpoint.format == "torchao"
        assert set(checkpoint) == expected.keys()
        assert len(checkpoint.quantized) > 10
        for name, w in expected.items():
            if isinstance(w, QT):
                assert torch.equal(checkpoint[name].dequantize(), w.dequantize()), name
            else:
                assert torch.equal(checkpoint[name], w)


def test_it_converts_to_our_own_format_exactly(folder: Path, tmp_path: Path) -> None:
    report = pw.convert(folder, tmp_path / "own")
    assert {r.note for r in report.quantized} == {"exact"}
    theirs, ours = pw.load(folder), pw.load(tmp_path / "own")
    for name, w in theirs.items():
        if isinstance(w, QT):
            assert torch.equal(ours[name].dequantize(), w.dequantize()), name


def test_bad_metadata_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as f:
        metadata = f.metadata()
        tensors = {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118
    kinds = {n: json.loads(metadata[n])["_type"] for n in json.loads(metadata["tensor_names"])}
    name = next(n for n, kind in kinds.items() if kind == "Int8Tensor")
    for text, message in [
        ("not json", "does not describe a tensor"),
        ("[]", "does not describe a tensor"),
        ('{"_type": 3, "_data": {}}', "does not describe a tensor"),
        (metadata[name].replace('"qdata"', '"nothing"'), "is missing"),
        (re.sub(r'"block_size": \[[^]]*\]', '"block_size": [1, 0]', metadata[name]), "must be a positive size"),
        (re.sub(r'"block_size": \[[^]]*\]', '"block_size": {"a": "b"}', metadata[name]), "."),
        ('{"_type": "os.system", "_data": {}, "_tensor_data_names": []}', "os.system"),
    ]:
        save_file(tensors, file, {**metadata, name: text})
        with pytest.raises(CheckpointError, match=message):
            pw.open(folder)
    del metadata[name]
    save_file(tensors, file, metadata)
    with pytest.raises(CheckpointError, match="belongs to no tensor described in the metadata"):
        pw.open(folder)


@pytest.mark.parametrize("path", sorted((GOLDEN / "torchao_pickles").glob("*.pt"))[:4], ids=lambda p: p.stem)
def test_pickles_need_consent(path: Path) -> None:
    with pytest.raises(CheckpointError, match="pass allow_pickle=True if you trust"):
        pw.open(path)
    with pw.open(path, allow_pickle=True) as checkpoint:
        assert checkpoint.quantized
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            expected = torch.load(path, weights_only=True)
        for name in checkpoint.quantized:
            assert_same(checkpoint[name], expected[name])


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return print, ("run",)

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "noise.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    torch.save({"a": "text"}, tmp_path / "text.pt")
    for name in ("evil.pt", "noise.bin", "list.pt", "text.pt"):
        with pytest.raises(CheckpointError):
            pw.open(tmp_path / name, allow_pickle=True)


def test_tied_tensors_of_a_pickle_stay_one(tmp_path: Path) -> None:
    w = torch.randn(4, 8)
    torch.save({"embed.weight": w, "head.weight": w, "other.weight": w.clone()}, tmp_path / "m.pt")
    pw.convert(tmp_path / "m.pt", tmp_path / "own", allow_pickle=True)
    state = pw.load(tmp_path / "own")
    assert state["embed.weight"] is state["head.weight"]
    assert state["other.weight"] is not state["embed.weight"]
    assert all(torch.equal(t, w) for t in state.values())


def test_the_reader_needs_no_adapter(folder: Path) -> None:
    """Neither safetensors nor pickles import torchao's names."""
    pickle = sorted((GOLDEN / "torchao_pickles").glob("*.pt"))[0]
    code = (
        f"import sys, pennyweight as pw; print(len(pw.open({str(folder)!r}).quantized) > 10, "
        f"len(pw.open({str(pickle)!r}, allow_pickle=True).quantized) > 0, "
        "any(m.startswith(('torchao', 'pennyweight_torchao')) for m in sys.modules))"
    )
    run = forked.run(["-c", code], check=True)
    assert run.stdout == "True True False\n"


def test_a_weight_whose_input_is_scaled_first(tmp_path: Path) -> None:
    """act_pre_scale of AWQ and SmoothQuant: without it the weight is another one."""
    linear = torch.nn.Linear(64, 16)
    pw.quantize_(linear, pw.Int8WeightOnlyConfig())
    factors = torch.linspace(0.5, 2, 64)
    tensors, metadata = flatten_tensor_state_dict({"m.weight": linear.weight.with_(pre_scale=factors)})
    assert torch.equal(tensors["m._weight_act_pre_scale"], factors)
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    read = pw.load(tmp_path)["m.weight"]
    assert torch.equal(read.dequantize(), linear.weight.dequantize() * factors)
    save_file({**tensors, "m._weight_act_pre_scale": torch.ones(63)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(
        CheckpointError, match=r"m\.weight: act_pre_scale must have one number per input channel, \[64\]"
    ):
        pw.open(tmp_path)
