"""Output projection and cross-entropy in one op, without the logits of all tokens in memory."""
