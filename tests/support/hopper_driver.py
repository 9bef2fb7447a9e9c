"""Stand-in for the driver of a Hopper GPU, for compilations without a GPU."""

import pytest

triton = pytest.importorskip("triton")


class Hopper:
    """Stand-in for Triton's driver with the functions that a compilation needs."""

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0
