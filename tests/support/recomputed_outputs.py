"""Function whose output is recomputed in the backward pass."""

from megatron_packed.memory.recompute_outputs import recomputed_output


def without_output(first, second, x):
    """Return ``second(first(x))`` without saving the output of ``first``."""
    y = first(x)
    with recomputed_output(y, first, x):
        return second(y)
