"""Importance matrices: both formats, what is refused, collected from a model, and used as llama.cpp uses them."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import pennyweight as pw
from pennyweight.io import CheckpointError
from pennyweight.io.gguf.imatrix import Imatrix, Moments, collect_imatrix, read_imatrix, write_imatrix
from pennyweight.io.gguf.quantize import WEIGHTED, quantize
from tests.io.gguf.test_export import CONFIG, llama, saved


def dat(entries: list[tuple[bytes, int, list[float]]], tail: bytes = b"", count: int | None = None) -> bytes:
    out = [struct.pack("<i", len(entries) if count is None else count)]
    for name, calls, values in entries:
        out += [struct.pack("<i", len(name)), name, struct.pack("<ii", calls, len(values))]
        out.append(struct.pack(f"<{len(values)}f", *values))
    return b"".join(out) + tail


TAIL = struct.pack("<ii", 3, 5) + b"a.txt"


def test_the_older_format(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(dat([(b"blk.0.attn_q.weight", 4, [8.0, 4.0]), (b"output.weight", 0, [1.0, 3.0])], TAIL))
    found = read_imatrix(path)
    assert (found.chunks, found.datasets) == (3, ("a.txt",))
    torch.testing.assert_close(found.importance("blk.0.attn_q.weight", (7, 2)), torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(found.importance("output.weight", (7, 2)), torch.tensor([1.0, 3.0]))
    assert found.importance("blk.0.attn_k.weight", (7, 2)) is None
    experts = found.importance("blk.0.attn_q.weight", (2, 5, 1))  # the older format does not separate them
    assert experts is not None
    assert experts.tolist() == [[2.0], [1.0]]
    with pytest.raises(CheckpointError, match=r"i\.dat: blk\.0\.attn_q\.weight: has importance for 2 inputs.*needs 3"):
        found.importance("blk.0.attn_q.weight", (7, 3))
    path.write_bytes(dat([(b"a.weight", 1, [1.0])]))  # the oldest files end here
    assert read_imatrix(path).chunks == 0


def test_written_and_read_again(tmp_path: Path) -> None:
    moments = {
        "blk.0.ffn_up.weight": Moments(torch.tensor([[4.0, 8.0, 0.0]]), torch.tensor([4.0])),
        "blk.0.ffn_up_exps.weight": Moments(torch.tensor([[4.0, 8.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0])),
    }
    write_imatrix(Imatrix(moments, "", 2, 512, ("b.txt",)), tmp_path / "i.gguf")
    again = read_imatrix(tmp_path / "i.gguf")
    assert (again.chunks, again.chunk_size, again.datasets) == (2, 512, ("b.txt",))
    for name, m in moments.items():
        assert torch.equal(again.moments[name].sums, m.sums)
        assert torch.equal(again.moments[name].counts, m.counts)
    up = again.importance("blk.0.ffn_up.weight", (5, 3))
    assert up is not None
    assert up[:2].tolist() == [1.0, 2.0]
    assert 0 < up[2] < 1e-5
    experts = again.importance("blk.0.ffn_up_exps.weight", (2, 5, 2))
    assert experts is not None
    assert experts.tolist() == [[2.0, 4.0], [1.0, 1.0]]
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    shapes = {t.name: tuple(map(int, t.shape)) for t in reader.tensors}
    assert shapes["blk.0.ffn_up_exps.weight.in_sum2"] == (2, 2)
    assert shapes["blk.0.ffn_up_exps.weight.counts"] == (1, 2)
    assert reader.fields["general.type"].contents() == "imatrix"


def written(path: Path, tensors: dict[str, np.ndarray], kind: str = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, arch="")
    writer.add_type(kind)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ONE = np.ones((1, 4), np.float32)
BAD: dict[str, tuple[Any, str]] = {
    "another kind": (({"a.weight.in_sum2": ONE, "a.weight.counts": ONE[:, :1]}, "model"), "general.type is 'model'"),
    "no counts": (({"a.weight.in_sum2": ONE}, "imatrix"), r"a\.weight: has \.in_sum2 without \.counts"),
    "something else": (({"a.weight": ONE}, "imatrix"), r"a\.weight: expected NAME\.in_sum2"),
    "counts": (({"a.weight.in_sum2": ONE, "a.weight.counts": ONE}, "imatrix"), "1 experts and counts of 4"),
    "NaN": (({"a.weight.in_sum2": ONE * np.nan, "a.weight.counts": ONE[:, :1]}, "imatrix"), "a.weight: 4 of 4 sums"),
    "negative": (({"a.weight.in_sum2": -ONE, "a.weight.counts": ONE[:, :1]}, "imatrix"), "4 of 4 sums of squares are"),
    "half": (({"a.weight.in_sum2": ONE.astype(np.float16), "a.weight.counts": ONE[:, :1]}, "imatrix"), "F16; expected"),
    "empty": (b"", "truncated"),
    "text": (b"these are not the weights you are looking for", "neither"),
    "many entries": (dat([(b"a", 1, [1.0])], count=1 << 20), "neither"),
    "no second entry": (dat([(b"a", 1, [1.0] * 9)], count=2), "entry 1: .*truncated"),
    "values cut": (dat([(b"a", 1, [1.0] * 9)])[:-4], "a: declares 9 values, but 32 bytes"),
    "no values": (dat([(b"a", 1, [])], TAIL), "a: declares 0 values"),
    "calls": (dat([(b"a", -1, [1.0])]), "a: declares -1 calls"),
    "twice": (dat([(b"a", 1, [1.0])] * 2), "a: appears twice"),
    "name": (dat([(b"a" * 65, 1, [1.0])]), "entry 0: name of 65 bytes"),
    "not UTF-8": (dat([(b"\xff", 1, [1.0])], TAIL), "entry 0: its name is not UTF-8"),
    "infinite": (dat([(b"a", 1, [float("inf")])], TAIL), "a: 1 of 1 sums of squares are negative, NaN or infinite"),
    "data set": (dat([(b"a", 1, [1.0])], TAIL[:-1]), "name of 5 bytes"),
    "more": (dat([(b"a", 1, [1.0])], TAIL + b"x"), "1 bytes after"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_broken_file_is_refused(what: str, tmp_path: Path) -> None:
    content, reason = BAD[what]
    path = tmp_path / "i"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        written(path, *content)
    with pytest.raises(CheckpointError, match=reason) as error:
        read_imatrix(path)
    assert str(path) in str(error.value)


def test_any_byte_may_be_wrong(tmp_path: Path) -> None:
    """Changed and cut files are read or refused with a CheckpointError, nothing else."""
    path, draw = tmp_path / "i", np.random.default_rng(0)
    write_imatrix(Imatrix({"a.weight": Moments(torch.ones(2, 4), torch.ones(2))}), path)
    for seed in (path.read_bytes(), dat([(b"a.weight", 2, [1.0, 2.0])] + [(b"b.weight", 2, [1.0])], TAIL)):
        for _ in range(400):
            data = bytearray(seed[: draw.integers(len(seed) + 1)] if draw.random() < 0.3 else seed)
            for at in draw.integers(max(1, len(data)), size=draw.integers(1, 4)):
                if data:
                    data[at] = draw.integers(256)
            path.write_bytes(data)
            try:
                read_imatrix(path)
            except CheckpointError:
                continue


# -- collected ---------------------------------------------------------------------------------------------------------


def test_collected_from_a_model() -> None:
    model = llama()
    batches = [torch.arange(30).reshape(2, 15), {"input_ids": torch.arange(20)[None]}]
    found = collect_imatrix(model, batches)
    assert len(found.moments) == 7 * 2 + 1
    seen: list[Tensor] = []
    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with torch.no_grad():
        model(batches[0])
        model(**batches[1])
    hook.remove()
    x = torch.cat([x.flatten(0, 1) for x in seen])
    m = found.moments["blk.1.ffn_down.weight"]
    torch.testing.assert_close(m.sums[0], x.square().sum(0))
    assert m.counts.tolist() == [50.0]
    masked = {"input_ids": torch.arange(30).reshape(2, 15), "attention_mask": torch.ones(2, 15, dtype=torch.long)}
    masked["attention_mask"][1, :5] = 0
    assert collect_imatrix(model, [masked]).moments["output.weight"].counts.tolist() == [25.0]


def test_used_by_a_conversion(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():  # so that inputs differ in size
        for layer in model.model.layers:
            layer.input_layernorm.weight.copy_(torch.rand(256) ** 4 * 3)
            layer.post_attention_layernorm.weight.copy_(torch.rand(256) ** 4 * 3)
    batches = [torch.randint(300, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    write_imatrix(collect_imatrix(model, batches[1:]), tmp_path / "i.gguf")
    source = saved(model, tmp_path / "f")

    def error(name: str, **how: Any) -> float:
        pw.convert(source, tmp_path / name, to="gguf", gguf_type="Q2_K", **how)
        fresh = LlamaForCausalLM(CONFIG).eval()
        pw.load(tmp_path / name, fresh)
        with torch.no_grad():
            return float((fresh(batches[0]).logits - model(batches[0]).logits).square().mean())

    assert error("with.gguf", imatrix=tmp_path / "i.gguf") < 0.95 * error("without.gguf")
    fields = gguf.GGUFReader(tmp_path / "with.gguf").fields
    assert fields["quantize.imatrix.file"].contents() == "i.gguf"
    assert fields["quantize.imatrix.entries_count"].contents() == 15
    with pytest.raises(ValueError, match="imatrix= is only valid"):
        pw.convert(source, tmp_path / "x", imatrix=tmp_path / "i.gguf")
    wrong = {"blk.0.attn_q.weight": Moments(torch.ones(1, 128), torch.ones(1))}
    write_imatrix(Imatrix(wrong), tmp_path / "wrong.gguf")
    with pytest.raises(CheckpointError, match=r"wrong\.gguf: blk\.0\.attn_q\.weight: has importance for 128 inputs"):
        pw.convert(source, tmp_path / "x.gguf", to="gguf", gguf_type="q4_k", imatrix=tmp_path / "wrong.gguf")


@pytest.mark.parametrize("name", WEIGHTED)
def test_experts_have_their_own(name: str) -> None:
    x, importance = torch.randn(3, 4, 256), torch.rand(3, 256) ** 4 + 0.01
    together = quantize(x, name, importance)
    alone = [quantize(x[i], name, importance[i]) for i in range(3)]
    assert torch.equal(together.codes, torch.stack([parts.codes for parts in alone]))
    assert not torch.equal(together.codes, quantize(x, name).codes)
    with pytest.raises(ValueError, match="expected one per column"):
        quantize(x, name, importance[:2])


def test_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from pennyweight.cli.app import app

    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(app, ["convert", *map(str, arguments)], catch_exceptions=False)

    source, one = saved(llama(), tmp_path / "f"), tmp_path / "i.gguf"
    write_imatrix(Imatrix({"output.weight": Moments(torch.rand(1, 256), torch.ones(1))}), one)
    for name, more in (("a.gguf", ["--imatrix", one]), ("b.gguf", [])):
        assert run(source, tmp_path / name, "--to", "gguf", "--type", "Q4_K_M", *more).exit_code == 0
    a, b = ({t.name: t.data.tobytes() for t in gguf.GGUFReader(tmp_path / n).tensors} for n in ("a.gguf", "b.gguf"))
    assert {name for name in a if a[name] != b[name]} == {"output.weight"}
    refused = run(source, tmp_path / "c.gguf", "--to", "gguf", "--imatrix", one)
    assert refused.exit_code == 2
    assert "--imatrix" in refused.stderr
