"""The benchmark of optimizers: what is measured, and the arithmetic of its tables. No times are asserted."""

import torch

from benchmarks import optimizers as bench
from pennyweight.optim import AdamW8bit


def test_losses_are_compared_seed_by_seed() -> None:
    rows = [
        {"name": bench.BASE, "loss": [2.0, 4.0, 9.0]},
        {"name": "other", "loss": [2.02, 4.04, 9.09]},
        {"name": "fewer", "loss": [1.9, 4.2]},
    ]
    table = bench.loss_table(rows).split("\n")
    assert table[3] == "| other | 3 | 5.0500 | +0.0500 | +1.00 ± 0.00 % |"
    assert table[4] == "| fewer | 2 | 3.0500 | +0.0500 | +0.00 ± 63.53 % |"  # Student's t of one degree: 12.706 * 5


def test_rows_of_several_interpreters_stand_once() -> None:
    runs = [{"rows": {"times": [{"name": "a", "x": 1}]}}, {"rows": {"times": [{"name": "a", "x": 2}, {"name": "b"}]}}]
    assert bench.joined(runs) == {"times": [{"name": "a", "x": 1}, {"name": "b"}]}


def test_bytes_of_states_are_those_of_their_parts() -> None:
    p = torch.nn.Parameter(torch.randn(64, 256))
    p.grad = torch.randn(64, 256)
    ours, torchs = AdamW8bit([p]), torch.optim.AdamW([p])
    ours.step()
    torchs.step()
    assert bench.state_bytes(ours) == ours.memory().quantized
    assert bench.state_bytes(torchs) == 8 * p.numel()


def test_what_is_installed_is_found() -> None:
    assert {bench.BASE, "pennyweight AdamW8bit", "bitsandbytes AdamW8bit"} <= bench.contenders().keys()
