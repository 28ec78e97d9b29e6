"""save_pretrained, whose own writer removes old files first, to a folder that takes the old one's place at the end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import pennyweight as pw
import pennyweight.integrations.transformers
from pennyweight.integrations.transformers import attach_quantizer
from pennyweight.io import CheckpointError, replacing
from tests.integrations.small import llama
from tests.io.crashing import Crash, stopping


def quantized(config: Any) -> Any:
    model = llama()
    pw.quantize_(model, config)
    return attach_quantizer(model, config)


def write(folder: Path, config: Any) -> None:
    with replacing(folder) as new:
        quantized(config).save_pretrained(new, max_shard_size="40KB")


def formats(folder: Path) -> tuple[set[str], str]:
    """Of the weights, and what config.json says."""
    held = pw.load(folder).values()
    said = json.loads((folder / "config.json").read_text())["quantization_config"]["config"]["type"]
    return {t.spec.format.name for t in held if isinstance(t, pw.AffineQuantizedTensor)}, said


OLD, NEW = pw.Int8WeightOnlyConfig(), pw.NF4WeightOnlyConfig()


@pytest.mark.parametrize("how", ["before", "after"])
def test_weights_and_config_are_of_one_save(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    out = tmp_path / "out"
    write(tmp_path / "old", OLD)
    old = formats(tmp_path / "old")
    shutil.copytree(tmp_path / "old", out)
    with stopping(how) as steps:
        write(out, NEW)
    new = formats(out)
    assert (old, new) == (({"int8"}, "Int8WeightOnlyConfig"), ({"nf4"}, "NF4WeightOnlyConfig"))
    count, seen = len(steps), []
    for at in {*range(0, count, 7), *range(count - 20, count)}:
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "old", out)
        with pytest.raises(Crash), stopping(how, at):
            write(out, NEW)
        assert formats(out) in (old, new)
        seen.append(formats(out))
    assert {str(s) for s in seen} == {str(old), str(new)}
    write(out, NEW)
    assert formats(out) == new
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old", "out"]
    again = LlamaForCausalLM.from_pretrained(out)
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids).logits, quantized(NEW).eval()(ids).logits)


def test_transformers_own_writer_alone_is_not_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/integrations.md warns of. Where this fails transformers has learned it, and the page may say so."""
    out = tmp_path / "out"
    quantized(OLD).save_pretrained(out, max_shard_size="40KB")
    old = formats(out)

    def crash(*args: Any, **kwargs: Any) -> None:
        raise Crash

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", crash)
    with pytest.raises(Crash):
        quantized(NEW).save_pretrained(out, max_shard_size="30KB")
    with pytest.raises((CheckpointError, AssertionError)):
        assert formats(out) == old
