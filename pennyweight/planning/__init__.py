"""Decides what quantize_ does to each parameter: configs, schemes, plans, and the report. Changes no model."""
