"""Quantization-aware training: a small network on handwritten digits with 2-bit weights.

python examples/tutorials/qat.py        (needs scikit-learn for the digits)
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.training import Teacher, parameter_groups

INT2 = pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(32), pw.MappingType.ASYMMETRIC)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels: 1347 for training, 450 for testing."""
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pictures, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return x[:1347], y[:1347], x[1347:], y[1347:]


def train_float(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 30) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()


def distil(model: nn.Module, teacher: Teacher, x: Tensor, epochs: int = 12) -> None:
    """An ordinary loop with any optimizer and schedule; the loss is the KL divergence from the float model."""
    optimizer = torch.optim.Adam(parameter_groups(model, lr=2e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(x)).split(64):
            loss = teacher.loss(model(x[batch]), x[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach()) * len(batch)
        schedule.step()
        if epoch % 4 == 3:
            print(f"    epoch {epoch + 1}: KL on the training data {total / len(x):.4f}")


def main() -> None:
    torch.manual_seed(0)
    x, y, test_x, test_y = data()
    model = network()
    train_float(model, x, y)
    teacher = Teacher(model)  # a frozen copy, from before anything is prepared
    found = {}

    @torch.no_grad()
    def judge(name: str, student: nn.Module) -> None:
        output = student(test_x)
        right = float((output.argmax(1) == test_y).double().mean())
        found[name] = float(teacher.loss(output, test_x))
        print(f"{name}: {100 * right:.1f} % right, KL to the float model {found[name]:.4f}")

    judge("float", model)
    nearest = copy.deepcopy(model)
    pw.quantize_(nearest, INT2)
    judge("2 bits, round-to-nearest", nearest)

    print("  prepared, trained, converted:")
    student = copy.deepcopy(model)
    pw.quantize_(student, pw.QATConfig(INT2, step="prepare"))
    distil(student, teacher, x)
    pw.quantize_(student, pw.QATConfig(INT2, step="convert"))
    judge("2 bits, trained from round-to-nearest", student)

    print("  the same from GPTQ's codes, with trained scales:")
    student = copy.deepcopy(model)
    pw.quantize_(
        student, pw.QATConfig(INT2, step="prepare", learn="all"), calibration=list(x[:512].split(64)), algorithm="gptq"
    )
    judge("2 bits, GPTQ", student)
    distil(student, teacher, x)
    with torch.no_grad():
        before = student(test_x)
    print(pw.quantize_(student, pw.QATConfig(step="convert")))
    assert torch.equal(student(test_x), before)  # what was trained is what is deployed, bit for bit
    judge("2 bits, trained from GPTQ", student)

    assert found["2 bits, trained from round-to-nearest"] < 0.2 * found["2 bits, round-to-nearest"]
    assert found["2 bits, trained from GPTQ"] < found["2 bits, trained from round-to-nearest"]


if __name__ == "__main__":
    main()
