"""What users write for torchao gives through our names what it gives in the real library (tests/golden)."""

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.torchao.tests.snippets import table

GOLDEN = Path(__file__).parent / "golden"
SNIPPETS = table.load()


@functools.cache
def recorded(release: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"torchao_snippets_{release}.json").read_text(encoding="utf-8"))


@functools.cache
def tensors(release: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"torchao_snippets_{release}.safetensors")


def decoded(value: Any, release: str) -> Any:
    if isinstance(value, dict):
        return tensors(release)[value["tensor"]]
    return [decoded(v, release) for v in value] if isinstance(value, list) else value


def same(got: Any, want: Any, tolerance: float | None) -> bool:
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want, [tolerance] * len(want)))
    if not isinstance(want, torch.Tensor):
        return type(got) is type(want) and got == want
    if not isinstance(got, torch.Tensor) or (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    if tolerance is None:
        return torch.equal(got, want)
    return bool((got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max())


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet(name: str) -> None:
    one = SNIPPETS[name]
    got = table.run(name)
    if name in recorded(one.release)["cannot"]:  # its own checks have run
        return
    want = {role: decoded(value, one.release) for role, value in recorded(one.release)["results"][name].items()}
    assert got.keys() == want.keys()
    wrong = {role for role in want if not same(got[role], want[role], one.approx.get(role))}
    assert {role: (got[role], want[role]) for role in wrong - set(one.differs)} == {}
    assert set(one.differs) <= wrong, "a difference that is none any more"


def test_every_snippet_is_recorded_once() -> None:
    for release in {one.release for one in SNIPPETS.values()}:
        kept = recorded(release)
        names = {name for name, one in SNIPPETS.items() if one.release == release}
        assert set(kept["results"]) | set(kept["cannot"]) == names
        assert not set(kept["results"]) & set(kept["cannot"])


def test_there_are_enough() -> None:
    assert len(SNIPPETS) >= 120


# So many results equal, differ for a stated reason, or are of snippets that the real library cannot run on a CPU.
def test_counts(torchao: ModuleType) -> None:
    cannot = sum(len(recorded(r)["cannot"]) for r in {one.release for one in SNIPPETS.values()})
    differ = sum(bool(one.differs) for one in SNIPPETS.values())
    assert differ <= 0.1 * len(SNIPPETS)
    assert cannot <= 0.15 * len(SNIPPETS)
