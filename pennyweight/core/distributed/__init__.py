"""Support for torch.distributed: DDP, FSDP2, DTensor, collectives, checkpoints."""
