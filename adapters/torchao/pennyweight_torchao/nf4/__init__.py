"""torchao's NF4Tensor (QLoRA): numbers, tensor class, operators and config."""
