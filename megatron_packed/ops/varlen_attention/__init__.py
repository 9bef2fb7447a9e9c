"""Causal attention inside each document of a pack."""
