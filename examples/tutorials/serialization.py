"""Save and load: the native safetensors format, torch.save, state dicts, models on the meta device.

python examples/tutorials/serialization.py
"""

import tempfile
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

import pennyweight as pw


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).eval()


def empty() -> nn.Sequential:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return network()


def show(name: str, path: Path) -> None:
    files = [path] if path.is_file() else sorted(path.iterdir())
    print(f"{name}: {sum(f.stat().st_size for f in files)} bytes in {', '.join(f.name for f in files)}")


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model, x = network(), torch.randn(3, 256)
    float_bytes = sum(p.nbytes for p in model.parameters())
    pw.quantize_(model, pw.FqnToConfig({"0": pw.Int4WeightOnlyConfig(group_size=64), "2": pw.Int8WeightOnlyConfig()}))
    y = model(x)
    print(f"float: {float_bytes} bytes; quantized: {sum(p.nbytes for p in model.parameters())}")

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        # The native format: data only, readable by any safetensors reader. load() fills any model of this shape, float
        # or quantized, on the meta device or not; the weights of the file replace the existing ones.
        pw.save(model, folder / "native")
        show("pw.save", folder / "native")
        assert torch.equal(pw.load(folder / "native", empty())(x), y)
        assert torch.equal(pw.load(folder / "native", network())(x), y)
        assert isinstance(pw.load(folder / "native")["0.weight"], pw.AffineQuantizedTensor)  # without a model

        # In one file, in shards, or in a custom file.
        pw.save(model, folder / "one.safetensors")
        pw.save(model, folder / "shards", max_shard_bytes=60_000)
        show("in shards", folder / "shards")
        assert torch.equal(pw.load(folder / "shards", empty())(x), y)
        tensors, metadata = pw.io.flatten(model.state_dict())
        safetensors.torch.save_file(tensors, folder / "own.safetensors", metadata)
        print(f"plain tensors in a file: {', '.join(sorted(tensors))}")
        assert torch.equal(pw.load(folder / "own.safetensors", empty())(x), y)

        # A damaged file is rejected as a whole, with its name and the reason, and the model is not changed.
        damaged = folder / "damaged.safetensors"
        damaged.write_bytes((folder / "one.safetensors").read_bytes()[:-100])
        victim = network()
        before = victim[0].weight.clone()
        try:
            pw.load(damaged, victim)
        except pw.CheckpointError as error:
            print(f"rejected: {error.reason}")
        else:
            raise AssertionError("a truncated file was loaded")
        assert torch.equal(victim[0].weight, before)

        # torch.save works too. weights_only=True needs only `import pennyweight`, no safe globals.
        torch.save(model.state_dict(), folder / "model.pt")
        show("torch.save", folder / "model.pt")
        state = torch.load(folder / "model.pt", weights_only=True)

    # Into a model on the meta device by assignment ...
    assigned = empty()
    assigned.load_state_dict(state, assign=True)
    assert torch.equal(assigned(x), y)

    # ... into a quantized one by copying, and into a float one by assignment, which makes its weights quantized.
    quantized, plain = network(), network()
    pw.quantize_(quantized, pw.FqnToConfig({"0": pw.Int4WeightOnlyConfig(64), "2": pw.Int8WeightOnlyConfig()}))
    assert not torch.equal(quantized(x), y)
    quantized.load_state_dict(state)
    assert torch.equal(quantized(x), y)
    plain.load_state_dict(state, assign=True)
    print(plain[0].weight)
    assert torch.equal(plain(x), y)
    print("loaded in seven ways: the same outputs")


if __name__ == "__main__":
    main()
