"""Quantize an image classifier to static int8: batch norms folded, convolutions fused, accuracy before and after.

A small convolution net is trained here first, on scikit-learn's handwritten digits.

    pip install . scikit-learn
    python examples/image_classifier.py
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pennyweight as pw


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [N, 1, 8, 8] and labels, for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16, torch.tensor(labels)[order]
    return x[:1347], y[:1347], x[1347:], y[1347:]


def trained_net(x: Tensor, y: Tensor) -> nn.Sequential:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*first, *second, nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(5):
        for batch in torch.randperm(len(x)).split(64):
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.eval()


def is_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Conv2d | nn.Linear)  # convolutions are not selected by default


def main() -> None:
    x, y, test_x, test_y = digits()
    net = trained_net(x, y)
    small, batches = copy.deepcopy(net), list(x[:256].split(64))
    config = pw.calibrate(small, batches, pw.Int8StaticActivationInt8WeightConfig, filter_fn=is_layer)
    print(pw.quantize_(small, config, calibration=batches, algorithm=["fold", "nearest"]))
    print(pw.fuse_(small, test_x[:1]))
    with torch.inference_mode():
        before, after = net(test_x), small(test_x)
    for name, output in (("float32", before), ("int8", after)):
        print(f"{name}: {(output.argmax(1) == test_y).double().mean():.1%} of {len(test_y)} test images right")
    print(f"same answer: {(before.argmax(1) == after.argmax(1)).double().mean():.1%}")


if __name__ == "__main__":
    main()
