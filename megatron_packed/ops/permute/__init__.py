"""Copies of tokens sorted by expert, and the weighted sum of each token's rows."""
