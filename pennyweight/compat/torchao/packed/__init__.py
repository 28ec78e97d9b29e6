"""Weights as torchao packed them for one kernel or GPU: their packings, classes and configs."""
