"""Calibration: data runs through the model block by block, and statistics of the inputs of its layers are collected."""
