"""Quantize a mixture of experts: int4 experts (3-d parameters), int8 attention, the router left in float.

The model is a small Mixtral with random weights, so that nothing is downloaded. With your own, use
`AutoModelForCausalLM.from_pretrained(...)`; `pw.plan(model, CONFIG)` shows what the patterns below select.

    pip install ".[hf]"
    python examples/moe.py
"""

import copy

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import pennyweight as pw

CONFIG = pw.FqnToConfig(
    {
        "*.experts.*": pw.Int4WeightOnlyConfig(group_size=64),  # gate_up_proj and down_proj: [experts, outputs, inputs]
        "*.mlp.gate*": None,  # the router: small, and an error there sends a token to other experts
        "lm_head": None,
        "_default": "int8-dynamic",  # attention
    }
)


def main() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    ids = torch.randint(512, (4, 64))

    small = copy.deepcopy(model)
    report = pw.quantize_(small, CONFIG)
    print(report)
    print(pw.compare(model, small, [ids]))
    with torch.inference_mode():
        chosen = [m(ids, output_router_logits=True).router_logits[-1].topk(2).indices for m in (model, small)]
    print(f"same two experts in the last layer: {(chosen[0] == chosen[1]).all(-1).double().mean():.1%} of tokens")


if __name__ == "__main__":
    main()
