"""Activation order goes into the layers before where that is exact; elsewhere nothing is changed without being told."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pennyweight as pw
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError
from pennyweight.planning.configs.by_name import by_name
from pennyweight.planning.parameters import Site

SITE = Site("u", "u", "weight", "linear", (64, 128), torch.float16, "cpu", "Linear")
INT4 = by_name("w4a16", 32).scheme(SITE).weight


def weight(rows: int, columns: int, spec: QuantSpec = INT4, perm: Tensor | None = None) -> QT:
    w = QT.from_float(torch.randn(rows, columns, dtype=torch.float16), spec)
    return w if perm is None else w.with_(perm=perm)


def save(folder: Path, state: dict[str, Tensor], **config: int) -> Path:
    pw.save(state, folder, metadata={"pennyweight_algorithm": "gptq"})
    (folder / "config.json").write_text(json.dumps({"model_type": "x", **config}))
    return folder


def values(folder: Path) -> dict[str, Tensor]:
    state = pw.load(folder)
    return {n: (t.dequantize(torch.float32) if isinstance(t, QT) else t.float()) for n, t in state.items()}


def mlp(w: dict[str, Tensor], x: Tensor) -> Tensor:
    gate = x @ w["m.gate_proj.weight"].double().T + w["m.gate_proj.bias"].double()
    up = x @ w["m.up_proj.weight"].double().T
    return (torch.nn.functional.silu(gate) * up) @ w["m.down_proj.weight"].double().T


@pytest.mark.parametrize("kind", ["quantized", "float", "ordered"])
@pytest.mark.parametrize("to", ["compressed-tensors", "vllm"])
def test_of_a_gated_mlp_it_moves_into_gate_and_up(kind: str, to: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    order = torch.randperm(64) if kind == "ordered" else None
    gate: Tensor = weight(128, 64, perm=order)
    if kind == "float":
        gate = gate.dequantize()
    state = {
        "m.gate_proj.weight": gate, "m.gate_proj.bias": torch.randn(128).half(),
        "m.up_proj.weight": weight(128, 64), "m.down_proj.weight": weight(64, 128, perm=torch.randperm(128)),
    }  # fmt: skip
    source = save(tmp_path / "own", state)
    how = {"for_": "vllm"} if to == "vllm" else {"to": to}
    if to == "vllm" and kind == "float":  # its parts do not have one scheme
        with pytest.raises(CheckpointError, match="gate_up_proj"):
            pw.convert(source, tmp_path / "no", **how)
        return
    if kind == "ordered":
        with pytest.raises(CheckpointError, match=r"m.gate_proj.weight: gptq chose its codes.*0 more"):
            pw.convert(source, tmp_path / "no", **how)
        report = pw.convert(source, tmp_path / "ct", requantize=True, **how)
    else:
        report = pw.convert(source, tmp_path / "ct", **how)
    assert report.notes[0].startswith("activation order undone in 1 weights such as m.down_proj.weight")
    before, after = values(source), values(tmp_path / "ct")
    notes = {row.name: row.note for row in report.rows}
    assert notes["m.down_proj.weight"] == "exact"
    perm = state["m.down_proj.weight"].plain_parts().perm.long()  # type: ignore[union-attr]
    assert torch.equal(after["m.down_proj.weight"], before["m.down_proj.weight"][:, perm])
    assert torch.equal(after["m.up_proj.weight"], before["m.up_proj.weight"][perm])
    assert torch.equal(after["m.gate_proj.bias"], before["m.gate_proj.bias"][perm])
    if kind != "ordered":
        x = torch.randn(3, 64, dtype=torch.float64)
        torch.testing.assert_close(mlp(after, x), mlp(before, x), rtol=1e-12, atol=1e-12)


def test_what_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    order = torch.randperm(128)
    for name, state in {
        "alone": {"m.q_proj.weight": weight(64, 128, perm=order)},
        "no producer": {"m.down_proj.weight": weight(64, 128, perm=order), "m.up_proj.weight": weight(128, 64)},
        "blocks of rows": {
            "m.fc2.weight": weight(64, 128, perm=order),
            "m.fc1.weight": weight(128, 64, QuantSpec(INT4.format, (2, 32), torch.float16)),
        },
    }.items():
        source = save(tmp_path / name, state)
        with pytest.raises(CheckpointError, match="gptq chose its codes"):
            pw.convert(source, tmp_path / "out", to="compressed-tensors")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("heads", [4, 3])
def test_of_attention_it_moves_within_heads(heads: int, tmp_path: Path) -> None:
    within = torch.cat([torch.randperm(32) + 32 * h for h in range(4)])
    state = {"m.o_proj.weight": weight(64, 128, perm=within), "m.v_proj.weight": weight(128, 64)}
    source = save(tmp_path / "own", state, num_attention_heads=heads)
    shared = save(tmp_path / "shared", state, num_attention_heads=4, num_key_value_heads=2)
    wide = save(
        tmp_path / "w", {**state, "m.o_proj.weight": weight(64, 128, perm=torch.randperm(128))}, num_attention_heads=4
    )
    for other in (shared, wide, *([source] if heads == 3 else [])):
        with pytest.raises(CheckpointError, match="gptq chose its codes"):
            pw.convert(other, tmp_path / "no", to="compressed-tensors")
    if heads == 4:
        pw.convert(source, tmp_path / "ct", to="compressed-tensors")
        before, after = values(source), values(tmp_path / "ct")
        assert torch.equal(after["m.v_proj.weight"], before["m.v_proj.weight"][within])


def test_files_that_store_it_keep_it(tmp_path: Path) -> None:
    state = {"m.down_proj.weight": weight(64, 128, perm=torch.randperm(128)),
             **{f"m.{name}_proj.weight": weight(128, 64) for name in ("gate", "up")}}  # fmt: skip
    source = save(tmp_path / "own", state)
    for to in ("gptq", "pennyweight"):
        assert pw.convert(source, tmp_path / to, to=to).notes == []
        assert all(torch.equal(t, values(source)[n]) for n, t in values(tmp_path / to).items())
    with pytest.raises(CheckpointError, match=r"does not read gptq files with activation order \(desc_act\)"):
        pw.convert(source, tmp_path / "no", to="gptq", for_="vllm")
