"""The README: its snippets run alone and in order, its commands exist, its figures are those of the measured pages."""

import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pennyweight as pw
from benchmarks import overview
from benchmarks.models.page import MEASURED, all_verdicts
from pennyweight.core.spec import SPECS
from pennyweight.support.extras import EXTRAS
from tests import forked
from tests.integrations.small import float_folder, quantized, tokenizer
from tests.io.hub_server import Hub

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
MODEL = "HuggingFaceTB/SmolLM2-135M"


@pytest.fixture
def model_hub(hub: Hub, tmp_path: Path) -> Hub:
    """The Hub with a small model under the README's name."""
    folder = float_folder(tmp_path / "float")
    hub.add(MODEL, {f.name: f.read_bytes() for f in folder.iterdir()})
    return hub


def test_three_lines_for_a_hugging_face_model(model_hub: Hub) -> None:
    assert f'"{MODEL}"' in BLOCKS[0]
    assert len(BLOCKS[0].strip().splitlines()) == 3
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    weights = [w for w in names["model"].state_dict().values() if isinstance(w, pw.AffineQuantizedTensor)]
    assert len(weights) == 14  # seven linear layers in each of two blocks


def test_ten_lines_for_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    code = [line for line in BLOCKS[1].splitlines() if line]
    assert len(code) <= 10
    names: dict[str, Any] = {}
    exec(BLOCKS[1], names)
    assert "0.weight" in capsys.readouterr().out
    assert names["report"].bytes_after < names["report"].bytes_before / 6
    assert not isinstance(names["model"][0].weight, pw.AffineQuantizedTensor)  # undone
    assert list((tmp_path / "small").glob("*.safetensors"))


def test_all_snippets_in_order_in_a_new_process(model_hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "all.py").write_text("\n".join(BLOCKS), encoding="utf-8")
    env = os.environ | {"HF_ENDPOINT": model_hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    done = forked.run(["all.py"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2.weight" in done.stdout


def block_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse imports of what only other extras than those of the README's installation bring."""
    found = re.findall(r'^pip install "\.\[(.*)\]"', README, re.M)
    assert len(found) == 1
    for extra in EXTRAS.keys() - set(found[0].split(",")) - {"hub"}:  # transformers needs huggingface_hub
        for package in EXTRAS[extra]:
            monkeypatch.setitem(sys.modules, package, None)


def test_the_commands_run(model_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small model under the name on the Hub, and none of the packages that the installation leaves out."""
    from pennyweight.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README[:2000], encoding="utf-8")
    block_packages(monkeypatch)
    lines = [line for line in README.splitlines() if line.startswith("pennyweight ")]
    assert [line.split()[1] for line in lines] == ["quantize", "report", "convert", "chat"]
    # rows of 256, which K-quants need
    folder = float_folder(tmp_path / "source", vocab_size=259, hidden_size=256, intermediate_size=256)
    tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    model_hub.add(MODEL, {f.name: f.read_bytes() for f in folder.iterdir()})
    for line in lines:
        monkeypatch.setattr(sys, "argv", shlex.split(line.partition(" #")[0]))
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None), line
    assert (tmp_path / "model.gguf").stat().st_size > 1000
    weights = quantized(AutoModelForCausalLM.from_pretrained("small"))
    assert {w.spec.format.name for w in weights.values()} == {"uint4", "int8"}


# -- figures -----------------------------------------------------------------------------------------------------------


def table(after: str) -> list[list[str]]:
    """Body of the first table after a text."""
    lines = README.partition(after)[2].partition("\n|")[2].split("\n\n", 1)[0].splitlines()
    return [[cell.strip(" *") for cell in line.strip("| ").split("|")] for line in lines if set(line) - set("|- ")]


def test_accuracy_is_that_of_the_measured_page() -> None:
    page = overview.ACCURACY.read_text(encoding="utf-8")
    found = overview.points(page)
    bits, ours, recipes, others = (row[1:] for row in table("in 10⁻³ nats"))
    named = {"search, tune": "mixed {:.4g} auto tune", "auto, distill": "int4 g128 zero point auto distill"}
    for size, own, recipe, other in zip(map(float, bits), map(float, ours), recipes, map(float, others), strict=True):
        mine = [p.kl for p in found if p.family == overview.OURS and abs(p.bits - size) < 0.005]
        best = min(p.kl for p in found if p.family != overview.OURS and p.bits <= size + 0.35)
        assert own == pytest.approx(1e3 * min(mine), abs=0.006)
        assert other == pytest.approx(1e3 * best, abs=0.006)
        name, _, seconds = recipe.partition(": ")
        measured = row(page, f"pennyweight {named[name].format(size)}")
        assert float(measured[1]) == pytest.approx(1e-3 * own, abs=6e-6)
        assert seconds == f"{measured[-1]} s"


def row(page: str, name: str) -> list[str]:
    """Cells after the name, of the language model's weights."""
    line = next(line for line in page.splitlines() if line.startswith((f"| {name} |", f"| **{name}** |")))
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


def test_the_plain_call_is_that_of_the_measured_page() -> None:
    """``"int4"`` on a bfloat16 model is the scheme of the row, as the bits say."""
    page = overview.ACCURACY.read_text(encoding="utf-8")
    ours, bits, theirs = re.findall(r"has ([\d.]+) at ([\d.]+) bits \(torchao's int4: ([\d.]+)\)", README)[0]
    for value, name in ((ours, "pennyweight int4 g128 tinygemm"), (theirs, "torchao int4 g128 tinygemm (prototype)")):
        measured = row(page, name)
        assert (float(bits), float(value)) == (float(measured[0]), pytest.approx(1e3 * float(measured[1])))
    model = torch.nn.Sequential(torch.nn.Linear(256, 64, dtype=torch.bfloat16))
    pw.quantize_(model, "int4")
    assert model[0].weight.spec.with_(layout="plain") == SPECS["tinygemm"]


def test_the_trained_language_model_is_that_of_the_measured_page() -> None:
    page = overview.ACCURACY.read_text(encoding="utf-8")
    said = README.partition("SmolLM2-135M-Instruct (float")[2].partition("**Speed**")[0]
    for value, bits, name in (
        ("3.96", "8.05", "pennyweight int8"), ("145", "4.32", "pennyweight int4 g64 zero point gptq"),
        ("109", "4.32", "pennyweight int4 g64 zero point auto"),
        ("428", "3.30", "pennyweight int3 g64 zero point auto"),
        ("1660", "2.29", "pennyweight int2 g64 zero point auto"),
        ("160", "4.31", "llm-compressor GPTQ W4A16 g64 asymmetric"), ("349", "4.32", "pennyweight int4 g64 zero point"),
        ("267", "4.50", "pennyweight int4 g64 tinygemm hqq"), ("323", "4.50", "pennyweight int4 g64 tinygemm"),
        ("246", "4.50", "hqq int4 g64"), ("308", "4.50", "bitsandbytes NF4"),
        ("317", "4.50", "torchao int4 g64 tinygemm (prototype)"),
    ):  # fmt: skip
        measured = row(page, name)
        assert re.search(rf"\b{re.escape(value)}\b", said), name
        assert float(value) == pytest.approx(1e3 * float(measured[1]), rel=0.005), name
        assert float(bits) == pytest.approx(float(measured[0]), abs=0.006), name


def test_the_picture_says_what_it_shows() -> None:
    said = re.search(r"the lowest curve from ([\d.]+) to ([\d.]+) bits", README)
    assert said is not None
    start, end = map(float, said.groups())
    front = overview.front(overview.points(overview.ACCURACY.read_text(encoding="utf-8")))
    own = [p.bits for p in front if p.family == overview.OURS]
    assert (start, end) == (pytest.approx(own[0], abs=0.05), own[-1])
    assert not [p for p in front if p.family != overview.OURS and own[0] <= p.bits <= own[-1]]


CASES = (
    (("MiniLM 1x16", 8), ("MiniLM 1x128", 8), ("MiniLM 32x128", 8)),
    (("ResNet-18, 1 image", 8), ("MobileNetV2, 1 image", 8), ("ResNet-50, 16 images", 8)),
    (("Whisper-tiny encoder", 8),),
    (("SmolLM2-135M, prompt of 128", 4), ("SmolLM2-135M, decode at 128", 4),
     ("SmolLM2-135M, decode at 128, 8 sequences", 4)),
    (("SmolLM2-135M, generate 32 tokens", 4), ("SmolLM2-135M, load and first token", 4)),
    (("Llama 0.85B, prompt of 128", 4), ("Llama 0.85B, decode at 128", 4),
     ("Llama 0.85B, decode at 128, 8 sequences", 4)),
)  # fmt: skip


def test_speed_is_that_of_the_measured_rows() -> None:
    verdicts = {(v.case, v.bits): v for v in all_verdicts(json.loads(MEASURED.read_text(encoding="utf-8")))}
    rows = table("of whole models")[1:]
    for row, cases in zip(rows, CASES, strict=True):
        to_float, to_peer = (
            [float(x) for x in re.findall(r"\d+\.\d+", re.sub(r"\(.*?\)", "", cell))] for cell in row[1:]
        )
        measured = [verdicts[case].ours.x_float for case in cases]
        assert to_float == [pytest.approx(x, abs=0.051) for x in measured if x is not None], row
        assert to_peer == [pytest.approx(verdicts[case].ratio, abs=0.0051) for case in cases], row
        lost = [x for x in to_peer if x < 1]
        assert [x for x in to_peer if f"**{x:.2f}**" in README] == lost
    ratios = [v.ratio for v in verdicts.values() if v.ratio is not None]
    lost = sum(ratio < 1 for ratio in ratios)
    assert f"in {len(ratios)} cases, {lost} of them below 1" in README
    assert f"there are {lost} of them in {len(ratios)}" in README


def test_serving_is_that_of_the_measured_page() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    speed = {
        (way, requests): float(tokens)
        for way, requests, tokens in re.findall(r"^\| (.+?) \| 1 \| (\d+) \| ([\d.]+) \|", page, re.M)
    }
    theirs = {"int4": "vLLM int4", "int8": "vLLM int8 (W8A8)"}
    ours = {"int4": "pennyweight int4", "int8": "pennyweight int8-dynamic"}
    for name, *cells in table("**Serving** the same Llama")[1:]:
        for cell, peer in zip(cells, (theirs[name], "vLLM bfloat16"), strict=True):
            for requests, ratio in zip(("1", "32"), re.findall(r"[\d.]+", cell), strict=True):
                assert float(ratio) == pytest.approx(speed[ours[name], requests] / speed[peer, requests], abs=0.01)


def test_links_and_pictures_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(targets) > 20
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert not missing
