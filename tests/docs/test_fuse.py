"""docs/fuse.md: its code runs, and its numbers are those of the code."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.inference import fuse_conv_net, verify_block
from pennyweight.kernels.cpu import library
from tests.inference.fuse_models import inputs, model_of

PAGE = (Path(__file__).parents[2] / "docs" / "fuse.md").read_text(encoding="utf-8")


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    names = {"pw": pw, "torch": torch, "model": model_of("bert"), "batch": inputs("bert")}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    exec(compile(blocks[0], "fuse.md", "exec"), names)
    assert "encoder.layer.0" in capsys.readouterr().out


@pytest.mark.skipif(library.available() is not True, reason=str(library.available()))
def test_the_code_for_convolution_nets_runs() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    names = {"pw": pw, "net": net, "batches": [torch.randn(2, 3, 9, 9)], "images": torch.randn(2, 3, 9, 9)}
    names["layers"] = lambda module, name: isinstance(module, (nn.Conv2d, nn.Linear))
    exec(compile(re.findall(r"```python\n(.*?)```", PAGE, re.S)[1], "fuse.md", "exec"), names)
    assert isinstance(net, fuse_conv_net.FusedConvNet)


def test_the_limit_of_convolution_nets_is_that_of_the_code() -> None:
    assert re.findall(r"above ([0-9e-]+) of mean", PAGE) == [f"{fuse_conv_net.TOLERANCE:.0e}".replace("e-0", "e-")]


def test_the_limits_are_those_of_the_code() -> None:
    limits = re.findall(r"^\| (float32|bfloat16|float16|inputs .*?) \| ([0-9e-]+) \|", PAGE, re.M)
    v = verify_block
    assert [float(n) for _, n in limits] == [v.FLOAT32, v.BFLOAT16, v.FLOAT16, v.QUANTIZED_INPUTS]
