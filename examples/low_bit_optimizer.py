"""Train with AdamW whose states take 8 bits, or 4, beside torch's: bytes of the states and final losses.

A small network learns the sources of Python's standard library: to predict a byte from the 16 before it.

    pip install .
    python examples/low_bit_optimizer.py
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from pennyweight.optim import AdamW4bit, AdamW8bit


def batches(count: int) -> list[Tensor]:
    """Batches of 64 × 17 bytes of the standard library's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - 17, (count, 64, 1), generator=torch.Generator().manual_seed(0))
    return list(data[starts + torch.arange(17)])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Linear(16 * 32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256)]
    return nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *hidden)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> float:
    losses: list[float] = []
    for window in data:
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50  # nats per byte


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the states, scales included; a quantized state counts its stored bytes."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, Tensor))


def main() -> None:
    data = batches(400)
    for make in (torch.optim.AdamW, AdamW8bit, AdamW4bit):
        model = network()
        optimizer = make(model.parameters(), lr=2e-3)  # the same arguments
        loss = train(model, optimizer, data)
        print(f"{make.__name__}: states {state_bytes(optimizer) / 1e6:.2f} MB, loss {loss:.3f}")


if __name__ == "__main__":
    main()
