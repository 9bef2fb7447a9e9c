"""Megatron-LM's flags: flags whose effect is always on, refused flags, and different defaults."""
