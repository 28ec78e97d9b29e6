"""diffusers: a pipeline's models are quantized in place, and saved and loaded by their own calls or by ours."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from tests.integrations import writers
from tests.integrations.small import assert_same_weights
from tests.integrations.writers import Writer

pytest.importorskip("diffusers")

from diffusers import DDIMPipeline, DDIMScheduler, DiTTransformer2DModel, UNet2DModel

from pennyweight.integrations.diffusers import DiffusersConfig, DiffusersPennyweightQuantizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def unet() -> Any:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 32),
        norm_num_groups=8, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip


def image(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(3)
    return torch.from_numpy(pipeline(generator=noise, num_inference_steps=3, output_type="np").images)


@pytest.mark.parametrize("convolutions", [False, True])
def test_a_pipeline_is_quantized_saved_and_loaded(convolutions: bool, tmp_path: Path) -> None:
    pipeline = DDIMPipeline(unet(), DDIMScheduler(num_train_timesteps=10))
    exact = image(pipeline)
    picks = (lambda m, name: isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))) if convolutions else None
    report = pw.quantize_(pipeline.unet, pw.Int8WeightOnlyConfig(), picks)
    assert any(r.type == "Conv2d" for r in report.quantized) is convolutions
    said = image(pipeline)
    assert 0 < float((said - exact).abs().mean()) < 0.02

    pipeline.unet.save_config(tmp_path)
    pw.save(pipeline.unet, tmp_path)
    with torch.device("meta"):
        fresh = UNet2DModel.from_config(UNet2DModel.load_config(tmp_path))
    again = DDIMPipeline(pw.load(tmp_path, fresh).eval(), DDIMScheduler(num_train_timesteps=10))
    assert torch.equal(image(again), said)


@pytest.mark.parametrize("config", [pw.Int8DynamicActivationInt8WeightConfig(), pw.Int4WeightOnlyConfig(32)], ids=str)
def test_a_transformer(config: pw.AOBaseConfig) -> None:
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    ).eval()  # fmt: skip
    x, when, label = torch.randn(2, 4, 8, 8), torch.tensor([1, 5]), torch.tensor([0, 3])
    with torch.no_grad():
        exact = model(x, timestep=when, class_labels=label).sample
        report = pw.quantize_(model, config)
        got = model(x, timestep=when, class_labels=label).sample
    assert report.fraction > 0.8
    assert float((got - exact).norm() / exact.norm()) < 0.15


def read(folder: Path, other: Any) -> Any:
    return UNet2DModel.from_pretrained(folder)


FILE = "diffusion_pytorch_model.safetensors"


def pipeline_of(model: Any) -> Any:
    return DDIMPipeline(model, DDIMScheduler(num_train_timesteps=10))


WRITERS = {
    "save_pretrained": Writer(lambda m, d: m.save_pretrained(d), read),
    "save_pretrained, shards": Writer(lambda m, d: m.save_pretrained(d, max_shard_size="20KB"), read),
    "save_pretrained, pickle": Writer(lambda m, d: m.save_pretrained(d, safe_serialization=False), read),
    "save_pretrained, pw.load": Writer(lambda m, d: m.save_pretrained(d), lambda d, m: pw.load(d / FILE, m)),
    "save_pretrained twice": Writer(lambda m, d: m.save_pretrained(d), lambda d, m: again(read(d, m), d)),
    "DiffusionPipeline.save_pretrained": Writer(
        lambda m, d: pipeline_of(m).save_pretrained(d), lambda d, m: DDIMPipeline.from_pretrained(d).unet
    ),
    "save_config, pw.save": Writer(lambda m, d: (m.save_config(d), pw.save(m, d / FILE)), read),
}


def again(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder / "again")
    return read(folder / "again", model)


def said(model: Any) -> torch.Tensor:
    return image(pipeline_of(model))


@pytest.mark.parametrize("config", ["int8-dynamic", "int4", "nf4"])
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_writers(writer: Writer, config: str, tmp_path: Path) -> None:
    logging.getLogger("diffusers").setLevel(logging.CRITICAL)  # it looks for safetensors before it takes a pickle
    model = unet()
    picks = (torch.nn.Linear,) if "dynamic" in config else (torch.nn.Linear, torch.nn.Conv2d)
    pw.quantize_(model, writers.CONFIGS[config], lambda m, name: isinstance(m, picks))
    before = {n: p.spec for n, p in model.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)}
    writers.check(writer, model, unet(), tmp_path, said)
    loaded = writer.read(tmp_path, unet())  # type: ignore[misc]
    assert {n: p.spec for n, p in loaded.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)} == before


def test_what_is_float_again_is_saved_as_float(tmp_path: Path) -> None:
    model = unet()
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    assert model.config["quantization_config"].config == pw.Int8WeightOnlyConfig()
    pw.quantize_(model, pw.NF4WeightOnlyConfig(), lambda m, name: isinstance(m, torch.nn.Conv2d))
    assert model.config["quantization_config"].config is None  # by two
    model.save_pretrained(tmp_path / "quantized")
    loaded = read(tmp_path / "quantized", None)
    assert isinstance(loaded.hf_quantizer, DiffusersPennyweightQuantizer)
    pw.dequantize_(model)
    for i, plain in enumerate((model, loaded.dequantize())):
        assert getattr(plain, "hf_quantizer", None) is None
        plain.save_pretrained(tmp_path / f"float{i}")
        assert "quantization_config" not in json.loads((tmp_path / f"float{i}" / "config.json").read_text())
        held = read(tmp_path / f"float{i}", None).state_dict()
        assert all(torch.equal(held[name], t) for name, t in model.state_dict().items())


def test_a_model_of_which_quantize_saw_a_part(tmp_path: Path) -> None:
    model = unet()
    pw.quantize_(model.down_blocks, pw.Int8WeightOnlyConfig(), lambda m, name: isinstance(m, torch.nn.Conv2d))
    model.save_pretrained(tmp_path / "quantized")
    assert_same_weights(read(tmp_path / "quantized", None), model)
    pw.dequantize_(model.down_blocks)
    model.save_pretrained(tmp_path / "float")
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for bad in ({"version": 99}, {"version": True}, {"quant_method": "other"}, {"bits": 3}):
        with pytest.raises(ValueError, match=r"version|unknown"):
            DiffusersConfig(**bad)
    unet().save_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match=re.escape("call pw.quantize_ after it")):
        UNet2DModel.from_pretrained(tmp_path / "float", quantization_config=DiffusersConfig(pw.Int8WeightOnlyConfig()))
    model = unet()
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    model.save_pretrained(tmp_path / "ours")
    path = tmp_path / "ours" / "diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"int8"', b'"int9"') if b'"int8"' in data else data.replace(b"int8", b"int9"))
    with pytest.raises(pw.CheckpointError):
        UNet2DModel.from_pretrained(tmp_path / "ours")
