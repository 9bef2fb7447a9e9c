"""Causal depthwise convolution that restarts at each document."""
