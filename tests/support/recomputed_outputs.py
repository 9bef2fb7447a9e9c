"""A function whose output is computed again in the backward pass."""

from megatron_packed.memory.recompute_outputs import recomputed_output


def without_output(first, second, x):
    """``second(first(x))``, which saves nothing of what ``first`` returns."""
    y = first(x)
    with recomputed_output(y, first, x):
        return second(y)
