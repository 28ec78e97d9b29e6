"""Quantized models in the lm-eval harness (EleutherAI): a custom task, offline.

pip install lm-eval
python examples/tutorials/lm_harness.py

A small Llama is trained for some twenty seconds on the sources of Python's standard library, byte by byte, and
quantized with three configs; the harness measures bits per byte on modules that were not in the training data. Models
from the hub work the same way: HFLM accepts any transformers model, quantized or not.
"""

import copy
import json
import math
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # before datasets is imported

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import pennyweight as pw

TRAINED_ON = ("argparse.py", "ast.py", "configparser.py", "dataclasses.py", "inspect.py", "pathlib.py", "typing.py")
CALIBRATED_ON = ("shutil.py", "statistics.py")
TESTED_ON = ("csv.py", "heapq.py", "queue.py", "sched.py", "textwrap.py")
LENGTH, STEPS = 128, 400

TASK = """\
task: standard_library
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
  cache_dir: "{cache}"
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: byte_perplexity
  - metric: bits_per_byte
metadata: {{version: 1.0}}
"""


def source(names: tuple[str, ...]) -> list[str]:
    """Modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(folder / name).read_text(encoding="utf-8") for name in names]


def byte_tokenizer() -> Any:
    """One token per byte, and a start token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")


def windows(tokenizer: Any, names: tuple[str, ...]) -> Tensor:
    """Modules as rows of LENGTH tokens."""
    ids = torch.tensor([i for text in source(names) for i in tokenizer(text)["input_ids"]])
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def trained(tokenizer: Any) -> Any:
    """A Llama with a quarter of a million weights, trained on Python source code."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=288, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    model, data = LlamaForCausalLM(config), windows(tokenizer, TRAINED_ON)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for _ in range(STEPS):
        ids = data[torch.randint(len(data), (8,))]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def task(folder: Path) -> Any:
    """A custom task of the harness: its definition in YAML, its texts in JSON lines."""
    from lm_eval.tasks import TaskManager

    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text[:4000]}) + "\n" for text in source(TESTED_ON)), encoding="utf-8")
    (folder / "standard_library.yaml").write_text(TASK.format(data=data, cache=folder / "cache"), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def bits_per_byte(model: Any, tokenizer: Any, manager: Any) -> float:
    """Bits per byte measured by the harness."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=4, device="cpu")
    found = simple_evaluate(lm, tasks=["standard_library"], task_manager=manager, bootstrap_iters=0)
    return float(found["results"]["standard_library"]["bits_per_byte,none"])


@torch.no_grad()
def by_hand(model: Any, tokenizer: Any) -> float:
    """The same metric by hand: consecutive windows, each token predicted from those before it in its window."""
    nats, count = 0.0, 0
    for text in source(TESTED_ON):
        ids = torch.tensor(tokenizer(text[:4000])["input_ids"])
        before = torch.cat([torch.tensor([tokenizer.bos_token_id]), ids[:-1]])
        for at in range(0, len(ids), LENGTH):
            # the last window is extended to the left with tokens that are already counted
            begin = max(0, min(at, len(ids) - LENGTH))
            logits = model(before[None, begin : begin + LENGTH]).logits[0, at - begin :]
            labels = ids[at : begin + LENGTH]
            nats -= float(logits.double().log_softmax(-1).gather(1, labels[:, None]).sum())
            count += len(text[:4000].encode()[at : begin + LENGTH])
    return nats / count / math.log(2)


def main() -> None:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = trained(tokenizer)
    calibration = list(windows(tokenizer, CALIBRATED_ON)[:64].split(8))

    def layers(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and name != "lm_head"

    ways: dict[str, dict[str, Any]] = {
        "int8": {"config": pw.Int8WeightOnlyConfig()},
        "int3": {"config": pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32))},
        "int3, auto": {"config": pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)), "calibration": calibration},
    }
    with tempfile.TemporaryDirectory() as name:
        manager = task(Path(name))
        found = {"float": bits_per_byte(model, tokenizer, manager)}
        for way, how in ways.items():
            small = copy.deepcopy(model)
            pw.quantize_(small, filter_fn=layers, **how)
            found[way] = bits_per_byte(small, tokenizer, manager)
    for way, bits in found.items():
        print(f"{way:<12}{bits:.4f} bits per byte")

    assert abs(found["float"] - by_hand(model, tokenizer)) < 1e-3  # the harness computes the same metric
    assert found["float"] < 3.5  # of 8 without training
    assert abs(found["int8"] - found["float"]) < 0.01
    assert found["float"] < found["int3, auto"] < found["int3"]
    print("int8 has no measurable loss; calibration recovers part of the loss of int3")


if __name__ == "__main__":
    main()
