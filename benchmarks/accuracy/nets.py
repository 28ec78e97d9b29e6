"""Two small nets for scikit-learn's digits (1797 pictures of 8 x 8), trained in seconds and kept in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

EPOCHS, RATE, BATCH = 30, 2e-3, 64
VERSION = 1  # of what follows: another one trains anew


class Conv(nn.Module):
    """Three convolutions, one of them with a stride, a depthwise one, and a linear layer; batch norms are folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1, stride=2)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.depthwise, self.conv3):
            x = F.relu(conv(x))
        return self.head(x.mean((2, 3)))

    layers = ("conv2", "depthwise", "conv3")


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and around which the input passes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Sixteen patches of 2 x 2, width 128, three blocks."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(torch.zeros(1, 16, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))

    layers = tuple(f"blocks.{i}.{name}" for i in range(3) for name in ("qkv", "out", "up", "down"))


NETS = {"digits-conv": Conv, "digits-vit": ViT}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(pictures, labels) to train with, and every fourth for the test. float32 [n, 1, 8, 8] in 0 to 1, int64 [n]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target, dtype=torch.int64)
    test = torch.arange(len(x)) % 4 == 3
    return x[~test], y[~test], x[test], y[test]


def load(name: str, cache: Path) -> nn.Module:
    """A trained net in eval mode; trained now where the cache has it not."""
    told = f"{name} {VERSION} {EPOCHS} {RATE} {BATCH}"
    file = cache / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:12]}.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(_train(name).state_dict(), file)
    net = NETS[name]()
    net.load_state_dict(load_file(file))
    return net.eval()


def _train(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = NETS[name]()
        norms = _with_norms(net)
        x, y, _, _ = digits()
        optimizer = torch.optim.AdamW([*net.parameters(), *norms.parameters()], lr=RATE, weight_decay=0.01)
        steps = EPOCHS * (len(x) // BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
        for _ in range(EPOCHS):
            for some in torch.randperm(len(x))[: len(x) // BATCH * BATCH].view(-1, BATCH):
                loss = F.cross_entropy(net(x[some]), y[some])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return _folded(net, norms)


def _with_norms(net: nn.Module) -> nn.ModuleDict:
    """A batch norm after every convolution but the patches', by hooks, so that folding them leaves the net's names."""
    norms = nn.ModuleDict()
    for name, module in net.named_children():
        if isinstance(module, nn.Conv2d) and name != "patch":
            norms[name] = nn.BatchNorm2d(module.out_channels)
            module.register_forward_hook(lambda _, __, y, norm=norms[name]: norm(y))
    return norms


def _folded(net: nn.Module, norms: nn.ModuleDict) -> nn.Module:
    with torch.no_grad():
        for name, norm in norms.items():
            conv = getattr(net, name)
            factor = norm.weight / (norm.running_var + norm.eps).sqrt()
            conv.weight *= factor[:, None, None, None]
            conv.bias.copy_((conv.bias - norm.running_mean) * factor + norm.bias)
            conv._forward_hooks.clear()
    return net.eval()
