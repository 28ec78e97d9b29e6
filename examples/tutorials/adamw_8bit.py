"""Train with 8-bit and 4-bit optimizer states: the same losses, a quarter and a seventh of the state memory.

python examples/tutorials/adamw_8bit.py
"""

import copy
import io

import torch
from torch import Tensor, nn

from pennyweight.optim import AdamW4bit, AdamW8bit


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))


def train(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of minibatches of 128."""
    losses = []
    for step in steps:
        some = torch.arange(step * 128, step * 128 + 128) % x.shape[0]
        loss = nn.functional.mse_loss(model(x[some]), y[some])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 64)
    with torch.no_grad():
        y = network()(x) * 4  # targets from another network of this shape
    start = network()

    final = {}
    for make in (torch.optim.AdamW, AdamW8bit, AdamW4bit):
        model = copy.deepcopy(start)
        optimizer = make(model.parameters(), lr=1e-3)
        final[make] = sum(train(model, x, y, optimizer, range(300))[-8:]) / 8
        line = f"{make.__name__:10s} loss {final[make]:.4f}"
        if make is not torch.optim.AdamW:
            line += f", states {optimizer.memory().ratio:.3f} of float32"
        print(line)
    assert final[AdamW8bit] < 1.2 * final[torch.optim.AdamW]
    assert final[AdamW4bit] < 1.5 * final[torch.optim.AdamW]

    print(optimizer.memory())
    state = optimizer.state[model[2].weight]["exp_avg"]
    print(f"a state: {state.spec}, {list(state.shape)}, {state.nbytes} bytes")

    # bfloat16 parameters with stochastic rounding: updates below half a unit in the last place are not lost.
    halves = copy.deepcopy(start).bfloat16()
    optimizer = AdamW8bit(halves.parameters(), lr=1e-3, bf16_stochastic_round=True)
    half = (x.bfloat16(), y.bfloat16())
    train(halves, *half, optimizer, range(100))

    # A checkpoint resumes bit-identically: the random numbers are a function of parameter, element and step.
    file = io.BytesIO()
    torch.save({"model": halves.state_dict(), "optimizer": optimizer.state_dict()}, file)
    wanted = train(halves, *half, optimizer, range(100, 120))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = copy.deepcopy(start).bfloat16()
    resumed.load_state_dict(saved["model"])
    optimizer = AdamW8bit(resumed.parameters(), lr=1e-3, bf16_stochastic_round=True)
    optimizer.load_state_dict(saved["optimizer"])
    assert train(resumed, *half, optimizer, range(100, 120)) == wanted
    print(f"bfloat16 with 8-bit states: loss {wanted[-1]:.4f}; the resumed run has the same losses, bit for bit")


if __name__ == "__main__":
    main()
