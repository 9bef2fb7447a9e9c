"""Estimates of GPU memory and parameter counts of a configuration, without a GPU or weights."""
