"""A recipe that does not come to its end leaves the model as it was: same objects, same bits, same config."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms import Rewrite, Solution, Solver, Tuner
from pennyweight.algorithms.solvers.rtn import Nearest
from tests import forked
from tests.algorithms import models

INT8, INT4 = pw.Int8DynamicActivationInt8WeightConfig(), pw.Int4WeightOnlyConfig(16)


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def rows(seed: int = 0) -> list[Tensor]:
    return [torch.randn(16, 32, generator=torch.Generator().manual_seed(seed + i)) for i in range(4)]


class Held:
    """What a model is, to the object and to the bit."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = list(model.named_parameters(remove_duplicate=False))
        self.kinds = [type(m) for m in model.modules()]
        self.values = {name: t.detach().clone() for name, t in model.state_dict().items()}
        self.grads = [p.requires_grad for _, p in self.parameters]
        config = getattr(model, "config", None)
        self.config = None if config is None else copy.deepcopy(config.to_dict())

    def check(self, same_objects: bool = True) -> None:
        now = list(self.model.named_parameters(remove_duplicate=False))
        assert [n for n, _ in now] == [n for n, _ in self.parameters]
        if same_objects:
            assert all(p is q for (_, p), (_, q) in zip(now, self.parameters, strict=True))
        assert [type(p) for _, p in now] == [type(p) for _, p in self.parameters]
        assert [p.requires_grad for _, p in now] == self.grads
        assert [type(m) for m in self.model.modules()] == self.kinds
        state = self.model.state_dict()
        assert list(state) == list(self.values)
        assert all(torch.equal(state[n], t) for n, t in self.values.items())
        if self.config is not None:
            assert self.model.config.to_dict() == self.config  # type: ignore[union-attr]


@dataclass(frozen=True)
class Scribble(Rewrite):
    """Somebody's rewrite, which writes into everything it finds, makes more, and takes nothing back."""

    name = "scribble"  # type: ignore[misc]

    def apply(self, model: nn.Module, target: Any, batches: Any) -> dict[str, str]:
        for p in model.parameters():
            p.data.mul_(1.5)
        first = next(m for m in model.modules() if isinstance(m, nn.Linear))
        first.weight = nn.Parameter(first.weight.detach() + 1)
        first.extra = 3  # type: ignore[assignment]
        first.register_buffer("more", torch.ones(2))
        first.register_forward_hook(lambda *_: None)
        return {}


@dataclass(frozen=True)
class Stops(Tuner):
    name = "stops"  # type: ignore[misc]
    error: type[BaseException] = KeyboardInterrupt

    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        for p in model.parameters():
            if p.ndim == 1:
                p.data.add_(1)
        raise self.error("stop")


@dataclass(frozen=True)
class StopsAt(Solver):
    name = "stops_at"  # type: ignore[misc]
    at: str = "4.weight"
    error: type[BaseException] = RuntimeError

    def solve(self, task: Any) -> Solution:
        if task.name == self.at:
            raise self.error("stop")
        return Nearest().solve(task)


SMOOTH = {"smooth": {"alpha": 0.5, "held_out": 0}}  # scales whatever comes of it


@pytest.mark.parametrize("spill", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize(
    ("algorithm", "error"),
    [
        ([SMOOTH, "rotate", "gptq"], pw.PlanError),  # refused: no residual stream
        ([SMOOTH, StopsAt()], RuntimeError),
        ([StopsAt(error=KeyboardInterrupt)], KeyboardInterrupt),
        ([Scribble(), StopsAt()], RuntimeError),
        ([Scribble(), "nearest", Stops()], KeyboardInterrupt),
        ([SMOOTH, "gptq", "bias", Stops(MemoryError)], MemoryError),
        (["gptq", {"tune": {"steps": 2}}, Stops(SystemExit)], SystemExit),
        ([SMOOTH, "gptq", {"tune": {"metric": "kln"}}], ValueError),
    ],
)
def test_whatever_ends_it(algorithm: Any, error: type[BaseException], spill: bool, tmp_path: Path) -> None:
    model = mixed().requires_grad_(False)
    model[0].weight.requires_grad_()
    held = Held(model)
    with pytest.raises(error):
        pw.quantize_(model, INT8, calibration=rows(), algorithm=algorithm, spill=tmp_path if spill else None)
    held.check(same_objects=not (spill or any(isinstance(s, (Scribble, dict)) for s in algorithm)))
    assert not list(tmp_path.iterdir())
    assert not model[0]._forward_hooks
    assert not hasattr(model[0], "extra")
    pw.quantize_(model, INT8, calibration=rows(), algorithm="gptq")  # and it works as if nothing had been


def test_a_step_that_does_not_apply_is_found_before_anything_is_solved() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x))) + self.a(x)

    model, solved = Two(), []
    held = Held(model)
    with pytest.raises(pw.PlanError, match="reconstruct: Two is not a chain of blocks"):
        pw.quantize_(
            model, INT4, calibration=rows(), algorithm=["gptq", "reconstruct"], progress=lambda *a: solved.append(a)
        )
    assert solved == []
    held.check()


def test_a_rotated_and_untied_model_comes_back_with_its_config() -> None:
    model = models.decoder("Llama", tie_word_embeddings=True)
    held = Held(model)
    with pytest.raises(KeyboardInterrupt):
        pw.quantize_(
            model, INT4, models.blocks_only, calibration=models.ids(),
            algorithm=[{"rotate": {"online": True, "held_out": 0}}, "nearest", Stops()],
        )  # fmt: skip
    held.check(same_objects=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_an_error_of_the_caller_s_own() -> None:
    model = mixed()
    held = Held(model)

    def stop(done: int, total: int, name: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        pw.quantize_(model, INT4, calibration=rows(), algorithm="gptq", progress=stop)
    assert error.value.__notes__ == ["the model was restored to its state before quantize_"]
    held.check()


ALIVE = """
import gc, sys, weakref
import pennyweight as pw
from tests.quantize.test_rollback import INT4, mixed, rows
model = mixed()
gone = [weakref.ref(model[i].weight) for i in (0, 2, 4)]
pw.quantize_(model, INT4, calibration=rows(), algorithm=["smooth", "gptq", "bias"], spill=sys.argv[1])
gc.collect()
assert [w() for w in gone] == [None] * 3
"""


def test_what_has_succeeded_holds_no_float_weight(tmp_path: Path) -> None:
    """The float weights are for the way back alone. In a process of its own: other tests leave references behind."""
    command = ["-c", ALIVE, str(tmp_path)]
    done = forked.run(command, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(tmp_path.iterdir())
