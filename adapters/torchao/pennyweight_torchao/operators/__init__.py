"""Custom operators of torch under torchao's namespace: ``torch.ops.torchao``."""
