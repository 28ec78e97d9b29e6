"""diffusers takes no quantizers of others: a pipeline's models are quantized in place, and saved and loaded by ours."""

from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw

pytest.importorskip("diffusers")

from diffusers import DDIMPipeline, DDIMScheduler, DiTTransformer2DModel, UNet2DModel

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
