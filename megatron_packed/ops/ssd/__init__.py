"""State space duality: the scan of Mamba-2, which restarts at each document."""
