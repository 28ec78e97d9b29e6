"""pw.push_to_hub, save_pretrained's push_to_hub and Hub ids, against a local server with the Hub's protocol."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants, snapshot_download
from transformers import AutoModelForCausalLM

import pennyweight as pw
from pennyweight.io.hub import HubError, is_hub_id, local_path
from pennyweight.io.model_card import MARK, REPOSITORY
from tests.integrations.small import assert_same_weights, llama
from tests.io.hub_server import Hub

REPO = "org/small"
# huggingface_hub 2.4 uploads LFS objects by an argument that its HTTP library deprecates
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def written(folder: Path, config: str = "int4", **how: Any) -> Any:
    """A quantized llama, saved in a folder."""
    model = llama()
    pw.quantize_(model, config, skip=["lm_head"])
    model.save_pretrained(folder, **how)
    return model


def data(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -- uploads -----------------------------------------------------------------------------------------------------------


def test_a_folder_comes_back_equal(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    model = written(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / ".env").write_text("SECRET=1")
    before = data(folder)
    address = pw.push_to_hub(folder, REPO, message="First", private=True)
    repo = hub.repos[REPO]
    assert address == f"{hub.url}/{REPO}/commit/{repo.branches['main']}"
    assert (repo.private, repo.messages[-1], data(folder)) == (True, "First", before)
    assert repo.main.keys() == {*before, "README.md", ".gitattributes"} - {".env"}

    again = Path(snapshot_download(REPO))
    assert all(data(again)[name] == content for name, content in before.items() if name != ".env")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(again), model)
    with pw.open(again) as a, pw.open(folder) as b:
        assert a.quantized == b.quantized
        assert all(torch.equal(a[n].dequantize(), b[n].dequantize()) for n in a.quantized)


def test_the_card_names_the_repository_and_is_valid(hub: Hub, tmp_path: Path) -> None:
    written(tmp_path / "small")
    pw.push_to_hub(tmp_path / "small", "name-only")
    text = hub.repos["tester/name-only"].main["README.md"].decode()
    assert MARK in text
    assert REPOSITORY not in text
    assert 'from_pretrained("tester/name-only")' in text
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"


@pytest.mark.parametrize("save_as", ["pennyweight", "compressed-tensors"])
def test_push_to_hub_of_a_model(hub: Hub, tmp_path: Path, save_as: str) -> None:
    llama().save_pretrained(tmp_path / "float")
    config = pw.PennyweightConfig("int8", save_as=save_as)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    model.push_to_hub(REPO)
    files = hub.repos[REPO].main
    assert {"config.json", "model.safetensors", "README.md"} <= files.keys()
    assert json.loads(files["config.json"])["quantization_config"]["quant_method"] == save_as
    again = snapshot_download(REPO)
    card = ModelCard(files["README.md"].decode())
    assert MARK in card.text
    assert f'from_pretrained("{REPO}")' in card.text
    assert "| SQNR of the weights | mean" in card.text
    fresh = pw.load(again, llama())
    for name, w in model.named_parameters():
        other = fresh.get_parameter(name)
        assert torch.equal(getattr(w, "dequantize", lambda w=w: w)(), getattr(other, "dequantize", lambda o=other: o)())
    if save_as == "pennyweight":
        assert_same_weights(AutoModelForCausalLM.from_pretrained(again), model)


def test_push_to_hub_of_a_model_quantized_in_place(hub: Hub) -> None:
    model = llama()
    pw.quantize_(model, "int4")
    model.push_to_hub(REPO, commit_message="Quantized", max_shard_size="50KB")
    assert sum(name.endswith(".safetensors") for name in hub.repos[REPO].main) > 1
    assert_same_weights(AutoModelForCausalLM.from_pretrained(snapshot_download(REPO)), model)


def test_the_card_of_a_pushed_model(hub: Hub, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    card = b"---\nlicense: apache-2.0\n---\nBase\n"
    hub.add("org/float", {**data(tmp_path / "float"), "README.md": card})

    def pushed(model: Any, **how: Any) -> ModelCard:
        model.push_to_hub(REPO, **how)
        return ModelCard(hub.repos[REPO].main["README.md"].decode())

    model = AutoModelForCausalLM.from_pretrained("org/float")
    assert "automatically generated" in pushed(model).text  # transformers' own, of a float model
    pw.quantize_(model, "int4")
    first = pushed(model, tags=["mine"])
    assert (first.data.base_model, first.data.license) == ("org/float", "apache-2.0")
    assert first.data.tags == ["pennyweight", "quantized", "int4", "mine"]
    config = pw.PennyweightConfig("int8")
    model = AutoModelForCausalLM.from_pretrained("org/float", quantization_config=config)
    second = pushed(model)  # a generated card is replaced, its tags are kept
    assert "Int8WeightOnlyConfig" in second.text
    assert second.data.tags == ["pennyweight", "quantized", "int8", "mine"]
    again = pushed(AutoModelForCausalLM.from_pretrained(REPO))
    assert again.data.base_model == "org/float"  # as before, not the quantized model itself
    hub.add(REPO, {"README.md": b"---\nlicense: mit\n---\nBy hand\n"})
    assert "By hand" in pushed(model).text


def test_a_new_checkpoint_replaces_the_weights_of_the_old_one(hub: Hub, tmp_path: Path) -> None:
    """An index that is left would name the old weights."""
    written(tmp_path / "shards", max_shard_size="50KB")
    model = written(tmp_path / "one", "int8")
    pw.push_to_hub(tmp_path / "shards", REPO)
    old = snapshot_download(REPO)
    assert "model.safetensors.index.json" in hub.repos[REPO].main
    pw.push_to_hub(tmp_path / "one", REPO)
    weights = [n for n in hub.repos[REPO].main if "safetensors" in n]
    assert weights == ["model.safetensors"]
    assert_same_weights(pw.load(local_path(REPO), llama()), pw.load(tmp_path / "one", model))
    assert len(hub.repos[REPO].messages) == 3  # one commit each, and the new repository's
    with pw.open(old) as first:  # a reader keeps what it has
        assert first.quantized


def test_branches(hub: Hub, tmp_path: Path) -> None:
    written(tmp_path / "small")
    for _ in range(2):
        pw.push_to_hub(tmp_path / "small", REPO, revision="int4")
    assert "model.safetensors" not in hub.repos[REPO].main
    assert pw.load(local_path(f"{REPO}@int4"))
    with pytest.raises(HubError, match="org/small has no revision 'int8'"):
        local_path(f"{REPO}@int8")


def test_cards_of_people_are_kept(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    written(folder)
    hub.add(REPO, {"README.md": b"---\nlicense: mit\n---\nMine\n"})
    pw.push_to_hub(folder, REPO)
    assert hub.repos[REPO].main["README.md"].endswith(b"Mine\n")
    pw.push_to_hub(folder, "org/generated")
    written(folder, "int8")
    pw.push_to_hub(folder, "org/generated")
    assert b"Int8WeightOnlyConfig" in hub.repos["org/generated"].main["README.md"]
    (folder / "README.md").write_text("By hand\n")
    pw.push_to_hub(folder, REPO)
    assert hub.repos[REPO].main["README.md"] == b"By hand\n"
    pw.push_to_hub(tmp_path / "small", "org/none", card=False)
    (folder / "README.md").unlink()
    pw.push_to_hub(tmp_path / "small", "org/without", card=False)
    assert "README.md" not in hub.repos["org/without"].main
    llama().save_pretrained(tmp_path / "float")
    pw.push_to_hub(tmp_path / "float", "org/float")
    assert "README.md" not in hub.repos["org/float"].main


def remove_a_shard(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()


def cut_a_shard(folder: Path) -> None:
    path = next(folder.glob("model-00002*"))
    os.truncate(path, path.stat().st_size - 10)


def lose_the_format(folder: Path) -> None:
    config = (folder / "config.json").read_bytes()
    shutil.rmtree(folder)
    llama().save_pretrained(folder)
    (folder / "config.json").write_bytes(config)


INCOMPLETE = {
    "interrupted": (lambda f: (f / "quantize.progress.json").write_text("{}"), "interrupted run; run the same command"),
    "a shard is missing": (remove_a_shard, "model-00002-of"),
    "a shard is cut": (cut_a_shard, "model-00002-of"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "model.safetensors"),
    "config.json is of other weights": (lose_the_format, "declares quantized weights"),
    "no folder": (shutil.rmtree, "small: is not a folder"),
    "a link out": (lambda f: (f / "x.txt").symlink_to("/etc/hostname"), "outside the folder"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_incomplete_folders_are_refused_before_anything_is_sent(hub: Hub, tmp_path: Path, case: str) -> None:
    written(tmp_path / "small", max_shard_size="50KB")
    change, why = INCOMPLETE[case]
    change(tmp_path / "small")
    with pytest.raises(HubError, match=f"small was not uploaded to {REPO}: .*{why}"):
        pw.push_to_hub(tmp_path / "small", REPO)
    assert hub.requests == []


def test_shards_of_another_checkpoint_and_hidden_files_stay_here(hub: Hub, tmp_path: Path) -> None:
    written(tmp_path / "small")
    shutil.copy(tmp_path / "small" / "model.safetensors", tmp_path / "small" / "model-00001-of-00002.safetensors")
    pw.push_to_hub(tmp_path / "small", REPO)
    assert [n for n in hub.repos[REPO].main if "safetensors" in n] == ["model.safetensors"]


def test_errors_name_repository_folder_and_remedy(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "small"
    written(folder)

    def fails(why: str, repo: str = REPO, **how: Any) -> None:
        with pytest.raises(HubError, match=f"^{folder} was not uploaded to {repo}: .*{why}") as caught:
            pw.push_to_hub(folder, repo, **how)
        assert "\n" not in str(caught.value)

    fails("refused the token .401.; log in again", token="hf_old")
    hub.readers.add("hf_read")
    fails("no permission to write there .403.; use one with the role write", token="hf_read")
    fails("public; make it private", repo="org/public", private=hub.add("org/public", {}).commits != {})
    fails("Repo id", repo="a/b/c")
    hub.fail.add("/api/repos/create")
    fails("answered .*nothing was changed there")
    hub.fail.clear()
    monkeypatch.setenv("HF_TOKEN", "")
    fails("no token; log in with hf auth login, or set HF_TOKEN")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails("HF_HUB_OFFLINE is set", token="hf_test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    fails("http://127.0.0.1:9 cannot be reached .*run the same command again", token="hf_test")
    assert REPO not in hub.repos


def test_a_failed_upload_changes_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    written(tmp_path / "small")
    pw.push_to_hub(tmp_path / "small", REPO)
    before = hub.repos[REPO].main
    written(tmp_path / "small", "int8")
    for part in ("/lfs/", "/commit/"):
        hub.fail = {part}
        with pytest.raises(HubError, match="nothing was changed there, run the same command again"):
            pw.push_to_hub(tmp_path / "small", REPO)
        assert hub.repos[REPO].main == before
    hub.fail = set()
    pw.push_to_hub(tmp_path / "small", REPO)
    assert hub.repos[REPO].main != before


# -- Hub ids -----------------------------------------------------------------------------------------------------------


def test_what_can_be_an_id() -> None:
    assert all(map(is_hub_id, ("org/name", "org/name@main", "org/name@refs/pr/1", "a.b/c_d-1.5B", "o/n-GGUF")))
    no = (
        "name",
        "./org/name",
        "/org/name",
        "org/name/x",
        "../name",
        "org/",
        "org/name@",
        "org/x.gguf",
        "~/x",
        "a\\b/c",
    )
    assert not any(
        map(is_hub_id, (*no, "org/model.safetensors", "org/x.bin", "org/na me", "org/../x", "org/name@../x"))
    )


def in_cache(folder: Path, repo: str = REPO, commit: str = "a" * 40) -> Path:
    """A folder's files as huggingface_hub caches them: links to blobs."""
    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copy(path, root / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    return snapshot


def test_local_paths_come_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for path in ("org/name", "missing", "./org/missing", str(tmp_path / "x"), "org/missing.gguf"):
        assert local_path(path) == path
    assert hub.requests == []


@pytest.mark.parametrize("offline", ["HF_HUB_OFFLINE", "no network"])
def test_the_cache_is_enough(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: str) -> None:
    written(tmp_path / "small")
    snapshot = in_cache(tmp_path / "small")
    if offline == "HF_HUB_OFFLINE":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    ids = [REPO, f"{REPO}@main"]
    if offline == "HF_HUB_OFFLINE":  # without a network, huggingface_hub asks for 20 seconds what a commit contains
        ids.append(f"{REPO}@{'a' * 40}")
    for name in ids:
        assert local_path(name) == str(snapshot)
    assert pw.load(local_path(REPO)).keys() == pw.load(tmp_path / "small").keys()
    why = "HF_HUB_OFFLINE is set" if offline == "HF_HUB_OFFLINE" else "http://127.0.0.1:9 cannot be reached"
    for name in ("org/other", f"{REPO}@other"):
        with pytest.raises(HubError, match=f"^{name}: no local path, not in the cache .*hub-cache, and {why}$"):
            local_path(name)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(HubError, match="has no weights"):
        local_path(REPO)
    assert hub.requests == []


def test_an_incomplete_cache_is_said(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "small")
    pw.push_to_hub(tmp_path / "small", REPO)
    (Path(local_path(REPO)) / "config.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="not complete in the cache"):
        local_path(REPO)


def test_only_data_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    written(tmp_path / "small")
    more = {
        "modeling_x.py": b"", "pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "original/model.safetensors": b"x",
        "1_Pooling/config.json": b"{}", "1_Pooling/code.py": b"", "LICENSE": b"MIT", "notes.pdf": b"", "x.gguf": b"x",
    }  # fmt: skip
    hub.add(REPO, {**data(tmp_path / "small"), **more})
    for allow_pickle in (False, True):
        folder = Path(local_path(REPO, allow_pickle))
        assert data(folder).keys() == {*data(tmp_path / "small"), "1_Pooling/config.json", "LICENSE"}


def test_weights_with_other_names(hub: Hub, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "w.bin")
    pickle = (tmp_path / "w.bin").read_bytes()
    hub.add("org/pickle", {"pytorch_model.bin": pickle, "config.json": b"{}"})
    with pytest.raises(HubError, match=r"org/pickle: its weights are pickles \(pytorch_model.bin\).*--allow-pickle"):
        local_path("org/pickle")
    path = local_path("org/pickle", allow_pickle=True)
    with pw.open(path, allow_pickle=True) as opened:
        assert torch.equal(opened["w"], torch.ones(2, 3))
    hub.add("org/one", {"x-q4.gguf": b"GGUF", "README.md": b""})
    assert Path(local_path("org/one")).name == "x-q4.gguf"
    hub.add("org/split", {f"x-0000{i}-of-00002.gguf": b"GGUF" for i in (1, 2)})
    path = local_path("org/split")
    assert Path(path).name == "x-00001-of-00002.gguf"
    assert len(list(Path(path).parent.glob("*.gguf"))) == 2
    hub.add("org/many", {"x-q4.gguf": b"GGUF", "x-q8.gguf": b"GGUF"})
    with pytest.raises(HubError, match=r"2 files of weights \(x-q4.gguf, x-q8.gguf\); download one with hf download"):
        local_path("org/many")
    hub.add("org/empty", {"config.json": b"{}"})
    with pytest.raises(HubError, match="org/empty has no weights"):
        local_path("org/empty")


def test_missing_repositories_are_said(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    with pytest.raises(
        HubError, match=r"^models/lama: not found, neither as a local path \(did you mean 'models/llama'\?"
    ):
        local_path("models/lama")
    with pytest.raises(HubError, match=r"^org/name: not found, neither as a local path nor as a repository of http"):
        local_path("org/name")
    hub.add("org/gated", {"model.safetensors": b"x"}, gated=True)
    with pytest.raises(HubError, match=r"^org/gated: the repository is gated; accept its terms at http.*/org/gated"):
        local_path("org/gated")
    hub.add("org/private", {}, private=True)
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(HubError, match=r"^org/private: not found, .*a private repository needs hf auth login"):
        local_path("org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(HubError, match=r"^org/name: not found"):
        local_path("org/name")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"org/name is not a local path; .* pip install huggingface_hub"):
        local_path("org/name")
    with pytest.raises(HubError, match=r"pip install huggingface_hub"):
        pw.push_to_hub(tmp_path, REPO)
