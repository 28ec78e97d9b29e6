"""Configs under torchao's names: assignment to their fields, its default values, and its transforms of one layer."""
