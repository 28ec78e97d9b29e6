"""Whole language models for `llm.py`: through transformers, and through llama.cpp."""
