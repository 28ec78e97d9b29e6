"""Algorithms on weights that stay in files: the bits of quantize_ in memory, resumed anywhere, in little memory."""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.algorithms import solve
from pennyweight.algorithms.calibration import disk_offload
from pennyweight.algorithms.solvers.gptq import GPTAQ, GPTQ
from pennyweight.io import calibrated_streaming
from pennyweight.io.atomic_write import folder_lock
from pennyweight.io.calibrated_streaming import STATE, quantize_mapped
from pennyweight.io.meta_model import fresh_model
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.quantize_report import size
from pennyweight.report.evaluation_inputs import load_folder
from tests import forked

transformers = pytest.importorskip("transformers")
CONFIG = pw.Int4WeightOnlyConfig(group_size=32)
LARGEST = {s: (7 + 4 * s().copies) * 128 * 64 + 12 * 64**2 for s in (GPTQ, GPTAQ)}  # lm_head while it is solved


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    mask = torch.ones(2, 36, dtype=torch.long)
    mask[0, :5] = 0  # a shorter text
    return [{"input_ids": torch.randint(128, (2, 36)), "attention_mask": mask}] * 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Float models by kind."""
    found = {}
    shape: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128,
    }  # fmt: skip
    for tied in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=tied))
        name = "tied" if tied else "llama"
        found[name] = tmp_path_factory.mktemp(name)
        model.to(torch.bfloat16).save_pretrained(found[name])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # biases to correct, gains to fold, and outliers that scales and rotations reduce
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(torch.rand_like(p) + 0.5 if "norm" in name else torch.randn_like(p) / 10)
            if "layernorm" in name:
                p[::17] *= 8
            elif "proj.weight" in name:
                p.mul_(3)
    found["outliers"] = tmp_path_factory.mktemp("outliers")
    model.save_pretrained(found["outliers"])
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    )
    found["gpt2"] = tmp_path_factory.mktemp("gpt2")
    gpt2.save_pretrained(found["gpt2"])
    return found


def in_memory(folder: Path, out: Path, algorithm: Any, config: Any = CONFIG, **more: Any) -> pw.Report:
    model = load_folder(str(folder))
    report = pw.quantize_(model, config, calibration=batches(), algorithm=algorithm, **more)
    pw.save(model, out)
    return report


def assert_same(a: Path, b: Path) -> None:
    with pw.open(a) as ours, pw.open(b) as theirs:
        assert set(ours) == set(theirs)
        assert set(ours.quantized) == set(theirs.quantized)
        for name in ours:
            x, y = ours[name], theirs[name]
            assert type(x) is type(y)
            if isinstance(x, pw.AffineQuantizedTensor):
                assert x.spec == y.spec
                assert all(
                    torch.equal(p, q) for p, q in zip(x.parts, y.parts, strict=True) if isinstance(p, torch.Tensor)
                )
            assert torch.equal(x, y) if not isinstance(x, pw.AffineQuantizedTensor) else True


RECIPES: dict[str, Any] = {
    **{
        name: name for name in ("gptq", "gptaq", "hqq", "imatrix", "auto", "nearest", "awq", "smooth", "rotate", "bias")
    },
    "reconstruct": [{"reconstruct": {"steps": 12, "rate": 0.01}}],
    "steps": ["awq", {"rotate": {"held_out": 0.0}}, "gptq", "bias", {"reconstruct": {"steps": 12}}],
}


DOES = {  # what the report says of the model with outliers
    "awq": "awq kept for", "smooth": "smooth kept for", "rotate": "rotated: held-out", "bias": "bias corrected",
    "reconstruct": "3 of 3 blocks reconstructed", "steps": "blocks reconstructed",
}  # fmt: skip


@pytest.mark.parametrize("algorithm", RECIPES)
@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2", "outliers"])
def test_the_result_is_that_in_memory(
    kind: str, algorithm: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_offload, "SMALL", 1 << 10)  # the weights of these models are small
    name, algorithm = algorithm, RECIPES[algorithm]
    want = in_memory(folders[kind], tmp_path / "memory", algorithm)
    report = pw.quantize_checkpoint(
        folders[kind], tmp_path / "files", CONFIG, calibration=batches(), algorithm=algorithm, max_memory="1 GB"
    )
    assert_same(tmp_path / "files", tmp_path / "memory")
    assert [(r.name, r.sqnr, r.error, r.note) for r in report.rows] == [
        (r.name, r.sqnr, r.error, r.note) for r in want.rows
    ]
    assert want.notes == report.notes
    if kind == "outliers" and name in DOES:
        assert DOES[name] in " ".join([*report.notes, *(row.note for row in report.rows)])
    assert not (tmp_path / "files" / STATE).exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "files")
    assert loaded(**batches()[0]).logits.isfinite().all()
    untied = any("untied" in row.note for row in report.rows)
    assert loaded.config.tie_word_embeddings is (kind != "llama" and not untied)


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("algorithm", ["gptq", "gptaq"])
def test_stopped_at_any_weight_and_resumed(algorithm: str, folders: dict[str, Path], tmp_path: Path) -> None:
    want = tmp_path / "whole"
    pw.quantize_checkpoint(folders["llama"], want, CONFIG, calibration=batches(), algorithm=algorithm)
    for stop in (1, 4, 9, 16, 21):
        out, seen = tmp_path / str(stop), []

        def advance(done: int, total: int, name: str, stop: int = stop, seen: list[str] = seen) -> None:
            seen.append(name)
            if len(seen) == stop:
                raise _Stopped

        with pytest.raises(_Stopped):
            pw.quantize_checkpoint(
                folders["llama"], out, CONFIG, calibration=batches(), algorithm=algorithm, progress=advance
            )
        pw.quantize_checkpoint(folders["llama"], out, CONFIG, calibration=batches(), algorithm=algorithm)
        assert_same(out, want)


CHILD = """
import sys
sys.path.insert(0, {root!r})
from tests.io.test_calibrated_streaming import CONFIG, batches
import pennyweight as pw
show = lambda *at: print(*at, flush=True)
pw.quantize_checkpoint({src!r}, {dst!r}, CONFIG, calibration=batches(), algorithm="gptq", progress=show)
"""


def test_killed_and_resumed(folders: dict[str, Path], tmp_path: Path) -> None:
    want, out = tmp_path / "whole", tmp_path / "killed"
    pw.quantize_checkpoint(folders["llama"], want, CONFIG, calibration=batches(), algorithm="gptq")
    root = str(Path(__file__).parents[2])
    code = CHILD.format(root=root, src=str(folders["llama"]), dst=str(out))
    process = forked.start(["-c", code], stdout=forked.PIPE)
    assert process.stdout is not None
    for _ in range(12):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    solved = list((out / STATE).glob("solved-*.safetensors"))
    assert solved
    (out / STATE / f"solved-{len(solved):05d}.safetensors.part").write_bytes(b"half of a file")
    pw.quantize_checkpoint(folders["llama"], out, CONFIG, calibration=batches(), algorithm="gptq")
    assert_same(out, want)
    assert sorted(os.listdir(out)) == sorted(os.listdir(want))


def test_killed_when_the_result_is_in_place(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**more: Any) -> None:
        how = {"calibration": batches(), "algorithm": "gptq"} | more
        pw.quantize_checkpoint(folders["llama"], tmp_path / "out", CONFIG, **how)

    remove = shutil.rmtree

    def killed(path: Any, **how: Any) -> None:
        if Path(path).name == STATE:
            raise KeyboardInterrupt
        remove(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(calibrated_streaming.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            run()
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()}
    assert "model.safetensors" in before
    assert (tmp_path / "out" / STATE).exists()
    with pytest.raises(PlanError, match="is of another run: recipe differ"):
        run(algorithm="imatrix")
    own = tmp_path / "out" / "notes.txt"  # what the run has not written is not replaced
    own.write_text("mine")
    with pytest.raises(pw.CheckpointError, match="choose a new or empty folder"):
        run()
    assert own.read_text() == "mine"
    own.unlink()
    run()
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    with pytest.raises(pw.CheckpointError, match="choose a new or empty folder"):
        run()


def test_a_second_run_waits_for_none_and_leftovers_go(folders: dict[str, Path], tmp_path: Path) -> None:
    state = tmp_path / STATE
    state.mkdir()
    with folder_lock(str(state)), pytest.raises(pw.CheckpointError, match="another process is writing there"):
        pw.quantize_checkpoint(folders["llama"], tmp_path, CONFIG, calibration=batches(), algorithm="nearest")
    (state / "tmp-of-hidden-states").mkdir()
    (state / "mapped-0").write_bytes(b"what a killed run left")
    (state / "solved-00000.safetensors.part").write_bytes(b"half")
    seen: set[str] = set()

    def look(done: int, total: int, name: str) -> None:
        seen.update(os.listdir(state))

    pw.quantize_checkpoint(
        folders["llama"], tmp_path, CONFIG, calibration=batches(), algorithm="nearest", progress=look
    )
    assert seen == {"calibration.json"}
    assert not state.exists()


def test_another_run_of_the_folder_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 8:
            raise _Stopped

    with pytest.raises(_Stopped):
        pw.quantize_checkpoint(
            folders["llama"], tmp_path, CONFIG, calibration=batches(), algorithm="gptq", progress=stop
        )
    with pytest.raises(PlanError, match="is of another run: recipe differ"):
        pw.quantize_checkpoint(folders["llama"], tmp_path, CONFIG, calibration=batches(), algorithm="gptaq")
    pw.quantize_checkpoint(folders["llama"], tmp_path, CONFIG, calibration=batches(), algorithm="gptaq", resume=False)


def test_memory_goes_back_after_each_weight(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a search too; only while weights are in files."""
    calls: list[bool] = []
    monkeypatch.setattr(solve, "trim_heap", lambda: calls.append(disk_offload._FOLDER.get() is not None))
    report = pw.quantize_checkpoint(folders["llama"], tmp_path, CONFIG, calibration=batches(), algorithm="gptq")
    assert len(calls) >= len(report.quantized)
    model = pw.load(folders["llama"], fresh_model(str(folders["llama"])))
    done = len(calls)
    pw.search(model, batches(), "5 bpw", max_memory="1 GB")
    assert len(calls) > done
    assert all(calls)
    pw.quantize_(
        pw.load(folders["llama"], fresh_model(str(folders["llama"]))), CONFIG, calibration=batches(), algorithm="gptq"
    )
    assert not any(calls[-len(report.quantized) :])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_finished_weights_are_in_files(folders: dict[str, Path], tmp_path: Path) -> None:
    model = fresh_model(str(folders["llama"]))
    assert all(p.is_meta for p in model.parameters())
    pw.load(folders["llama"], model)
    quantize_mapped(model, CONFIG, str(tmp_path), None, calibration=batches(), algorithm="gptq")
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, rest = line.partition(" ")
        low, high = (int(end, 16) for end in where.split("-"))
        ranges.append((low, high, rest.rpartition(" ")[2]))
    for name, p in model.named_parameters():
        tensor: Any = p.data
        at = (tensor._codes if isinstance(tensor, pw.AffineQuantizedTensor) else tensor).data_ptr()
        file = next(file for low, high, file in ranges if low <= at < high)
        assert file.endswith(".safetensors"), name
        assert file.startswith(str(tmp_path)) is isinstance(tensor, pw.AffineQuantizedTensor)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_bias_that_the_class_does_not_have_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel.from_pretrained(folders["gpt2"])
    torch.nn.init.ones_(model.transformer.ln_f.bias)
    model.save_pretrained(tmp_path / "float")
    with pytest.raises(PlanError, match=r"adds or removes lm_head\.bias, and a model made from config\.json"):
        pw.quantize_checkpoint(
            tmp_path / "float", tmp_path / "out", CONFIG, calibration=batches(), algorithm=[{"rotate": {"held_out": 0}}]
        )
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_the_calibration_will_take(folders: dict[str, Path], tmp_path: Path) -> None:
    def run(**more: Any) -> pw.Report:
        how: dict[str, Any] = {"calibration": batches(), "algorithm": "gptaq", "dry_run": True} | more
        return pw.quantize_checkpoint(folders["llama"], tmp_path / "out", CONFIG, **how)

    time, memory = run().notes
    assert re.fullmatch(
        r"calibration with 134 tokens: about T \(running the model T, statistics T, solving T\); 2 processes T; "
        r"4 processes T".replace("T", r"\S+ [mµ]?s"),
        time,
    )
    # two statistics of 96 inputs (down_proj) and of 64 (of attention, its output, and MLP: weights with equal inputs
    # share them); hidden states in bfloat16, quantized and float
    statistics = 2 * 4 * (96**2 + 3 * 64**2)
    hidden = 2 * 2 * 2 * 36 * 64 * 2
    finished = sum(row.bytes_after for row in run().quantized)
    largest = LARGEST[GPTAQ]
    assert memory == (
        f"memory: about {size(statistics + largest)} beside mapped files; disk until the end: {size(hidden)} of hidden "
        f"states, {size(finished)} of weights"
    )
    assert run(algorithm=["smooth", "gptaq"]).notes[0].endswith("; without the time of smooth")
    assert not (tmp_path / "out").exists()


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def run(config: Any = CONFIG, **more: Any) -> Any:
        given: dict[str, Any] = {"calibration": batches(), "algorithm": "gptq"} | more
        return pw.quantize_checkpoint(folders["llama"], tmp_path / "out", config, **given)

    with pytest.raises(PlanError, match="the largest weight is solved it takes up to"):
        run(max_memory="10 kB")
    with pytest.raises(PlanError, match="statistics of its inputs take"):
        run(max_memory=LARGEST[GPTQ] + 1000)
    with pytest.raises(PlanError, match="or skip that layer"):  # the head is the largest; the embedding stays float
        run(algorithm="imatrix", max_memory=240_000, dry_run=True)
    assert run(algorithm="imatrix", max_memory=240_000, dry_run=True, skip=["lm_head"]).quantized
    with pytest.raises(PlanError, match="tune: it trains all weights at once, so the model must be in memory"):
        run(algorithm=["gptq", "tune"])
    with pytest.raises(PlanError, match="rotate: online adds a rotation at run time"):
        run(algorithm=[{"rotate": {"online": True}}])
    with pytest.raises(PlanError, match="bias: create adds biases"):
        run(algorithm=[{"bias": {"create": True}}], dry_run=True)
    with pytest.raises(PlanError, match="but reconstruct takes up to"):
        run(algorithm=["nearest", "reconstruct"], max_memory=39 * 128 * 64 + 1000)
    with pytest.raises(PlanError, match="filter_fn is not supported with an algorithm"):
        run(filter_fn=lambda module, name: True)
    with pytest.raises(PlanError, match="leave it out"):
        run(calibration=None, algorithm=None, max_memory="1 GB")
    with pytest.raises(PlanError, match="max_memory: a memory limit is a size"):
        run(max_memory="much")
    assert not (tmp_path / "out").exists()
    report = run(dry_run=True, max_memory="1 GB")
    assert report.quantized
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(pw.CheckpointError, match=r"contains notes\.txt; choose a new or empty folder"):
        run()
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
