"""What torch.distributed asks of the quantized tensor: DDP, FSDP2, DTensor, collectives, checkpoints."""
