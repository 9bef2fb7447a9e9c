"""Choice of the kernel of an adapter's second product."""

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.lora_expand.api import OP, LoraExpandInputs, lora_expand


@pytest.mark.parametrize(
    ("columns", "dtype", "reasons"),
    [
        (16, torch.bfloat16, 0),
        (32, torch.bfloat16, 0),
        (33, torch.bfloat16, 1),
        (16, torch.float32, 1),
    ],
)
def test_the_kernel_serves_few_columns_in_bf16(columns, dtype, reasons):
    inputs = LoraExpandInputs(columns=columns, dtype=dtype, device_type="cuda")
    assert len(OP.explain(inputs)["triton"]) == reasons


def test_a_cpu_runs_pytorch_and_refuses_the_kernel():
    low_TP, weight_OP, bias_O = (torch.randn(*shape).double() for shape in ((3, 2), (5, 2), (5,)))
    y_TO = lora_expand(low_TP, weight_OP, bias_O)
    torch.testing.assert_close(y_TO, low_TP @ weight_OP.t() + bias_O)
    with pytest.raises(NoBackendError, match="needs a CUDA device"):
        lora_expand(low_TP.bfloat16(), weight_OP.bfloat16(), backend="triton")
