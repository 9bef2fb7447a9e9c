"""``megatron-packed doctor``: what is installed, what of it works here, and what is used instead."""
