"""The table of benchmarks.training from runs that are made up, and that a run which is there is not run again."""

from pathlib import Path

import pytest

from benchmarks import training


def made_up(better: float) -> list[dict]:
    size = {"hidden": 1}
    rows = []
    for seed, base in enumerate((2.0, 2.2, 2.4)):
        rows.append({"kind": "loss", "name": "bfloat16", "seed": seed, "size": size, "loss": base})
        rows.append(
            {"kind": "loss", "name": "rowwise", "seed": seed, "size": size, "loss": base + better + 1e-4 * seed}
        )
    return rows


@pytest.mark.parametrize(("better", "verdict"), [(-0.01, "met"), (0.01, "not met"), (0.0020, "not resolved")])
def test_the_table_is_paired_by_seed(better: float, verdict: str) -> None:
    line = next(line for line in training.table(made_up(better)).splitlines() if line.startswith("| rowwise"))
    mean, half = better + 1e-4, 4.303 * 1e-4 / 3**0.5
    assert f"| 3 | {mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f}) |" in line
    assert line.endswith(f"| {verdict} |")


def test_a_run_that_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(training, "train", lambda size, name, seed: (calls.append((name, seed)), (None, [1.0]))[1])
    monkeypatch.setattr(training, "validation_loss", lambda size, model, name: 1.0)
    monkeypatch.setattr(training, "measure_gradients", lambda size, name, trained: {})
    path, size = tmp_path / "runs.jsonl", training.Size(steps=1)
    training.run(path, size, ["bfloat16", "rowwise"], 2, say=lambda line: None)
    assert calls[:4] == [("bfloat16", 0), ("rowwise", 0), ("bfloat16", 1), ("rowwise", 1)]
    calls.clear()
    training.run(path, size, ["bfloat16", "rowwise"], 2, say=lambda line: None)
    assert calls == []


def test_the_plot_is_of_whole_runs(tmp_path: Path) -> None:
    size = {"hidden": 1, "steps": 20}
    losses = [3 - 0.1 * i for i in range(20)]
    rows = [
        {"kind": "loss", "name": name, "seed": seed, "size": size, "loss": 1.0, "training": losses}
        for name in ("bfloat16", "rowwise") for seed in range(2)
    ]  # fmt: skip
    training.plot(rows, tmp_path / "losses.svg")
    text = (tmp_path / "losses.svg").read_text(encoding="utf-8")
    assert "rowwise (2 seeds)" in text
    training.plot(rows, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text
    for row in rows:
        row["training"] = row["training"][-5:]
    with pytest.raises(ValueError, match="no run of bfloat16 has kept all its losses"):
        training.plot(rows, tmp_path / "none.svg")
