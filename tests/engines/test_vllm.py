"""The vLLM plug-in in the real engine, against transformers on the same folder.

scripts/test-engines runs this file in an environment with vLLM; elsewhere it is skipped.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pennyweight as pw
from pennyweight.io import CheckpointError
from pennyweight.planning.configs.by_name import CONFIGS, algorithm_of
from tests.engines.small_models import VOCABULARY, save_llama, save_moe

pytest.importorskip("vllm", reason="vLLM is not installed; scripts/test-engines installs it")
from vllm.distributed import cleanup_dist_env_and_memory

HERE = Path(__file__).parent
# One process for most tests: an engine in processes of its own takes 20 seconds to start.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Rounding inputs to 8 bits turns a difference of one float32 rounding into one of a step: outputs then differ by far
# more than float32's, though less than quantization changes them.
ROUNDED_INPUTS = 0.25  # nats


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    yield
    gc.collect()
    cleanup_dist_env_and_memory()  # groups of processes, which the next model may need in another form


# -- helpers ---------------------------------------------------------------------------------------------------------


def vllm_tokens(folder: Path, **options: Any) -> list[list[int]]:
    from tests.engines.vllm_generate import engine, greedy

    return greedy(engine(str(folder), **options))


def vllm_logprobs(folder: Path, prompt: list[int], **options: Any) -> Tensor:
    """Log-probabilities after each token of the prompt but the last: [tokens - 1, vocabulary]."""
    from vllm import SamplingParams

    from tests.engines.vllm_generate import engine

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=VOCABULARY)
    out = engine(str(folder), **options).generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    rows = out.prompt_logprobs[1:]
    return torch.tensor([[row[t].logprob for t in range(VOCABULARY)] for row in rows])


def transformers_tokens(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    from tests.engines.vllm_generate import NEW_TOKENS, PROMPTS

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return [_greedy(model, p, NEW_TOKENS) for p in PROMPTS]


def _greedy(model: Any, prompt: list[int], n: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def transformers_logprobs(folder: Path, prompt: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def quantized(base: Path, out: Path, config: Any) -> Path:
    pw.quantize_checkpoint(base, out, config)
    return out


def in_processes(folder: Path, **options: Any) -> list[list[int]]:
    """Tokens of an engine in processes of its own, as users run it."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    if options.get("tensor_parallel_size", 1) == 1:
        del env["VLLM_CPU_OMP_THREADS_BIND"]
    command = [sys.executable, HERE / "vllm_generate.py", folder, json.dumps(options)]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("TOKENS "))


# -- native folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CONFIGS if not algorithm_of(n)])
def test_native_folder(name: str, llama: Path, tmp_path: Path) -> None:
    """The same tokens as transformers; where inputs are rounded as well, nearly the same log-probabilities."""
    folder = quantized(llama, tmp_path / "small", name)
    meta = next(iter(pw.open(folder).quantized.values()))
    if meta.act is None:
        assert vllm_tokens(folder) == transformers_tokens(folder)
        return
    prompt = list(range(5, 45))
    ours, theirs = vllm_logprobs(folder, prompt), transformers_logprobs(folder, prompt)
    assert (ours - theirs).abs().max() < ROUNDED_INPUTS
    assert (ours - transformers_logprobs(llama, prompt)).abs().max() > 0  # it is not the float model


def test_parts_of_a_fused_layer_may_differ(llama: Path, tmp_path: Path) -> None:
    """q, k, v and gate, up with different bits, one of them float: they run as parts."""
    config = pw.FqnToConfig(
        {
            r"re:.*q_proj": pw.Int8WeightOnlyConfig(),
            r"re:.*k_proj": pw.Int4WeightOnlyConfig(64),
            r"re:.*v_proj": None,
            r"re:.*gate_proj": pw.IntxWeightOnlyConfig(torch.int3),
            r"re:.*up_proj": pw.NVFP4WeightOnlyConfig(),
            "_default": pw.Int4WeightOnlyConfig(128),
        }
    )
    folder = quantized(llama, tmp_path / "mixed", config)
    assert vllm_tokens(folder) == transformers_tokens(folder)


def test_skipped_layers_and_heads_stay_float(llama: Path, tmp_path: Path) -> None:
    pw.quantize_checkpoint(llama, tmp_path / "small", "int4", skip=["lm_head", "o_proj", "layers.1.mlp"])
    assert vllm_tokens(tmp_path / "small") == transformers_tokens(tmp_path / "small")


@pytest.mark.parametrize("tie", [True, False])
def test_quantized_embeddings(tie: bool, tied: Path, llama: Path, tmp_path: Path) -> None:
    config = pw.FqnToConfig({"model.embed_tokens": pw.Int8WeightOnlyConfig(), "_default": pw.Int4WeightOnlyConfig(64)})
    folder = quantized(tied if tie else llama, tmp_path / "small", config)
    assert "model.embed_tokens.weight" in pw.open(folder).quantized
    assert vllm_tokens(folder) == transformers_tokens(folder)


def test_bfloat16(llama: Path, tmp_path: Path) -> None:
    """In bfloat16 the log-probabilities agree as well as those of the float model do."""
    folder, prompt = quantized(llama, tmp_path / "small", "int4"), list(range(5, 45))
    ours = vllm_logprobs(folder, prompt, dtype="bfloat16") - transformers_logprobs(folder, prompt)
    floats = vllm_logprobs(llama, prompt, dtype="bfloat16") - transformers_logprobs(llama, prompt)
    assert ours.abs().max() < 2 * floats.abs().max()


# -- mixture of experts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "nvfp4"])
def test_experts(name: str, moe: Path, tmp_path: Path) -> None:
    """Saved by transformers with stacked experts, quantized on disk with separate ones, quantized while loading."""
    from transformers import AutoModelForCausalLM

    from tests.engines.vllm_generate import NEW_TOKENS, PROMPTS

    model = AutoModelForCausalLM.from_pretrained(moe, dtype="bfloat16")
    pw.quantize_(model, name)
    model.save_pretrained(tmp_path / "stacked")
    model.float()
    wanted = [_greedy(model, p, NEW_TOKENS) for p in PROMPTS]
    assert vllm_tokens(tmp_path / "stacked") == wanted
    separate = vllm_tokens(quantized(moe, tmp_path / "separate", name))
    assert separate == wanted or name == "nvfp4"  # whose scales have a scale per tensor: of a stack, or of each expert
    assert vllm_tokens(moe, quantization=f"pennyweight-{name}") == separate


def test_experts_with_different_specs(moe: Path, tmp_path: Path) -> None:
    config = pw.FqnToConfig(
        {
            "re:.*experts.[0-3].(gate|down)_proj": pw.Int8WeightOnlyConfig(),
            "re:.*experts.4.*": None,
            "_default": pw.Int4WeightOnlyConfig(64),
        }
    )
    folder = quantized(moe, tmp_path / "small", config)
    floats = {n: t.dequantize() if hasattr(t, "spec") else t for n, t in pw.load(folder).items()}
    shutil.copytree(moe, tmp_path / "same")
    pw.save(floats, tmp_path / "same" / "model.safetensors")
    assert vllm_logprobs(folder, list(range(5, 25))) == pytest.approx(
        vllm_logprobs(tmp_path / "same", list(range(5, 25))), abs=2e-2
    )


# -- quantizing while loading, other formats -------------------------------------------------------------------------


def test_quantizing_while_loading(llama: Path, tmp_path: Path) -> None:
    """The same as quantizing on disk, by the name of the method or with any config."""
    on_disk = vllm_tokens(quantized(llama, tmp_path / "small", "int4"))
    assert vllm_tokens(llama, quantization="pennyweight-int4") == on_disk
    given = {"quant_method": "pennyweight", "config": "int4"}
    assert vllm_tokens(llama, quantization="pennyweight", hf_overrides={"quantization_config": given}) == on_disk
    config = pw.FqnToConfig({"lm_head": None, "_default": pw.Int8WeightOnlyConfig()})
    (tmp_path / "config.json").write_text(config.to_json())
    mixed = vllm_tokens(quantized(llama, tmp_path / "mixed", config))
    file = {"quantization_config_file": str(tmp_path / "config.json")}
    assert vllm_tokens(llama, quantization="pennyweight", hf_overrides=file) == mixed


def test_a_quantized_folder_is_not_quantized_again(llama: Path, tmp_path: Path) -> None:
    folder = quantized(llama, tmp_path / "small", "int4")
    with pytest.raises(Exception, match="pennyweight"):
        vllm_tokens(folder, quantization="pennyweight-int8")


@pytest.mark.parametrize("target", ["gptq", "compressed-tensors"])
def test_other_formats_on_our_kernels(target: str, llama: Path, tmp_path: Path) -> None:
    """quantization="pennyweight" loads other libraries' files; 3 bits are what vLLM's own GPTQ refuses."""
    config = pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(128)) if target == "gptq" else pw.Int8WeightOnlyConfig()
    native = quantized(llama, tmp_path / "native", config)
    pw.convert(native, tmp_path / "other", to=target)
    assert vllm_tokens(tmp_path / "other", quantization="pennyweight") == transformers_tokens(native)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_broken_folders_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = quantized(llama, tmp_path / "small", "int8")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        vllm_tokens(folder)
    weights.write_bytes(whole)
    state = pw.load(folder)
    del state["model.layers.1.mlp.down_proj.weight"]
    weights.unlink()
    pw.save(state, weights)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*not in the checkpoint"):
        vllm_tokens(folder)
    state = pw.load(quantized(llama, tmp_path / "again", "int8"))
    state["model.layers.1.mlp.down_proj.weight"] = state["model.layers.1.mlp.down_proj.weight"][:, :128]
    weights.unlink()
    pw.save(state, weights)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: .*\[256, 128\].*256 rows and 512 columns"):
        vllm_tokens(folder)
    state = pw.load(tmp_path / "again")
    del state["model.norm.weight"]
    weights.unlink()
    pw.save(state, weights)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        vllm_tokens(folder)


def test_a_float_model_needs_a_config(llama: Path) -> None:
    with pytest.raises(Exception, match="--quantization pennyweight-int4"):
        vllm_tokens(llama, quantization="pennyweight")


def test_a_weight_that_arrives_twice_counts_once() -> None:
    """A second copy does not stand for a part that is missing."""
    from pennyweight.integrations.vllm.linear import Pending, Piece

    pending = Pending(rows=4, columns=2)
    for _ in range(2):
        pending.add(Piece(0, 2, torch.ones(2, 2, device="cpu", dtype=torch.float32)))
    assert pending.missing() == 2
    pending.add(Piece(2, 2, None))
    assert pending.missing() == 0


def test_devices_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    from pennyweight.integrations.vllm.config import PennyweightVllmConfig

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ValueError, match=r"kernels run on CPUs.*--for vllm-gpu"):
        PennyweightVllmConfig(quantized=True)
    monkeypatch.undo()


# -- as users run it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_tensor_parallel(name: str, llama: Path, moe: Path, tmp_path: Path) -> None:
    folder = quantized(llama, tmp_path / "small", name)
    assert in_processes(folder, tensor_parallel_size=2) == transformers_tokens(folder)


def test_tensor_parallel_experts_and_embeddings(moe: Path, tied: Path, tmp_path: Path) -> None:
    folder = quantized(moe, tmp_path / "moe", "int4")
    assert in_processes(folder, tensor_parallel_size=2) == vllm_tokens(folder)
    config = pw.FqnToConfig({"model.embed_tokens": pw.Int8WeightOnlyConfig(), "_default": pw.Int4WeightOnlyConfig(64)})
    folder = quantized(tied, tmp_path / "tied", config)
    assert in_processes(folder, tensor_parallel_size=2) == transformers_tokens(folder)


def test_short_names_in_processes(llama: Path, tmp_path: Path) -> None:
    """The config of a short name reaches the other processes of the engine."""
    folder = quantized(llama, tmp_path / "small", "int8")
    assert in_processes(llama, quantization="pennyweight-int8") == transformers_tokens(folder)


def test_compiled(llama: Path, tmp_path: Path) -> None:
    folder = quantized(llama, tmp_path / "small", "int4")
    assert in_processes(folder, enforce_eager=False) == transformers_tokens(folder)


def test_vllms_torchao_method(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It quantizes with torchao's names, which are ours. In bfloat16, because it quantizes what the engine has cast."""
    given = '{"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}'
    monkeypatch.setenv("PENNYWEIGHT_TORCHAO", "1")
    options = {"dtype": "bfloat16", "hf_overrides": {"quantization_config_dict_json": given}}
    theirs = in_processes(llama, quantization="torchao", **options)
    config = pw.FqnToConfig({"lm_head": None, "_default": pw.Int8WeightOnlyConfig()})  # their method leaves heads float
    names = {"quant_method": "pennyweight", "config": pw.planning.configs.serialize.config_to_data(config)}
    options["hf_overrides"] = {"quantization_config": names}
    assert in_processes(llama, quantization="pennyweight", **options) == theirs


def test_serve(llama: Path, tmp_path: Path) -> None:
    """``vllm serve FOLDER`` answers /v1/completions."""
    from tests.engines.vllm_generate import NEW_TOKENS, PROMPTS

    folder, port = quantized(llama, tmp_path / "small", "int8"), "18731"
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options = ["--port", port, "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--skip-tokenizer-init", *options]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as server:
        try:
            request = {
                "model": str(folder), "prompt": PROMPTS[0], "max_tokens": NEW_TOKENS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            answer = _ask(f"http://127.0.0.1:{port}/v1/completions", request, server, tmp_path / "log")
        finally:
            server.terminate()
    assert answer["choices"][0]["token_ids"] == transformers_tokens(folder)[0]


def _ask(url: str, request: dict[str, Any], server: subprocess.Popen[bytes], log: Path) -> Any:
    data = json.dumps(request).encode()
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as e:
            raise AssertionError(e.read().decode()) from e
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])
