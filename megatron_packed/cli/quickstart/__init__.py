"""``megatron-packed quickstart``: a small model, trained on questions about Python's documentation."""
