"""Second product of adapters on a GPU."""

import pytest

from support.lora_expand_cases import SHAPES, check_of_kernel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [*SHAPES, (8192, 16, 8512)])
def test_the_kernel_is_the_product(shape):
    check_of_kernel(*shape, "cuda")
