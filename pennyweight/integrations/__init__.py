"""Adapters for transformers, PEFT, diffusers and other libraries, each imported by the name of its own module."""
