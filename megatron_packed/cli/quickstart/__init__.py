"""``megatron-packed quickstart``: train a small model on Python's documentation, and ask it."""
