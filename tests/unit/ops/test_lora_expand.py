"""Choice of the kernel of an adapter's second product."""

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.lora_expand import triton_kernel
from megatron_packed.ops.lora_expand.api import OP, LoraExpandInputs, lora_expand


def test_the_kernel_serves_bf16_and_leaves_many_columns_to_pytorch():
    def explained(columns, dtype):
        inputs = LoraExpandInputs(columns=columns, dtype=dtype, device_type="cuda")
        return OP.explain(inputs)["triton"], triton_kernel.remark(inputs)

    assert explained(32, torch.bfloat16) == ([], "")
    assert explained(33, torch.bfloat16) == ([], ", PyTorch's product for 33 columns")
    [reason], _ = explained(16, torch.float32)
    assert "must be bfloat16" in reason


def test_tensors_that_do_not_fit_are_refused():
    low_TP, weight_OP = torch.zeros(3, 2), torch.zeros(5, 2)
    for arguments in (
        (low_TP, weight_OP[:, :1]),
        (low_TP, weight_OP, torch.zeros(4)),
        (low_TP, weight_OP, torch.zeros(10)[::2]),
        (low_TP.t().contiguous().t(), weight_OP),
        (low_TP, weight_OP.bfloat16()),
    ):
        with pytest.raises(ValueError, match="must be"):
            lora_expand(*arguments)


def test_a_cpu_runs_pytorch_and_refuses_the_kernel():
    low_TP, weight_OP, bias_O = (torch.randn(*shape).double() for shape in ((3, 2), (5, 2), (5,)))
    y_TO = lora_expand(low_TP, weight_OP, bias_O)
    torch.testing.assert_close(y_TO, low_TP @ weight_OP.t() + bias_O)
    broken_TP = low_TP.clone()
    broken_TP[1] = torch.nan
    assert torch.equal(lora_expand(broken_TP, weight_OP, bias_O)[[0, 2]], y_TO[[0, 2]])
    torch.testing.assert_close(lora_expand(low_TP[2:], weight_OP, bias_O), y_TO[2:])
    with pytest.raises(NoBackendError, match="needs a CUDA device"):
        lora_expand(low_TP.bfloat16(), weight_OP.bfloat16(), backend="triton")
