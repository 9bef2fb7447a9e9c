"""Second product of adapters in Triton's interpreter; test_triton_interpreter.py runs it."""

import pytest

from support.lora_expand_cases import SHAPES, check_of_kernel


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_the_product(shape, bfloat16_of_a_gpu):
    check_of_kernel(*shape, "cpu")
