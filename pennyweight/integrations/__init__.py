"""Adapters for transformers, PEFT, diffusers and other libraries, one module each."""
