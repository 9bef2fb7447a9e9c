"""Second product of a low-rank adapter: a few columns times a wide matrix."""
