"""Rotary position embedding for packed documents, with a position for each token."""
