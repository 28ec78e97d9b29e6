"""Quantization-aware training at 2 bits: the quantized network learns the outputs of the float one.

A small network is trained here first, on scikit-learn's handwritten digits.

    pip install . scikit-learn
    python examples/qat.py
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.training import Teacher

CONFIG = pw.UIntXWeightOnlyConfig("uint2", group_size=32)  # 2 bits, a scale and a zero point for each group


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def main() -> None:
    torch.manual_seed(0)
    x, y = digits()
    train_x, train_y, test_x, test_y = x[:1347], y[:1347], x[1347:], y[1347:]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(20):
        for batch in torch.randperm(len(train_x)).split(64):
            nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()

    teacher, nearest = Teacher(model), copy.deepcopy(model)  # the teacher is a frozen copy of the float model
    pw.quantize_(nearest, CONFIG)
    pw.quantize_(model, pw.QATConfig(CONFIG, step="prepare"))  # forward passes now use the 2-bit weights
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(12):
        for batch in torch.randperm(len(train_x)).split(64):
            teacher.loss(model(train_x[batch]), train_x[batch]).backward()  # KL divergence from the float model
            optimizer.step()
            optimizer.zero_grad()
    print(pw.quantize_(model, pw.QATConfig(CONFIG, step="convert")))  # bit for bit the weights that were trained

    with torch.no_grad():
        for name, one in (("float", teacher.model), ("2 bits, round-to-nearest", nearest), ("2 bits, trained", model)):
            output = one(test_x)
            right, kl = (output.argmax(1) == test_y).double().mean(), teacher.loss(output, test_x)
            print(f"{name}: {right:.1%} of {len(test_y)} test images right, KL to float {kl:.4f}")


if __name__ == "__main__":
    main()
