"""The kernels that a run lists on a GPU are those that run, and missing kernels are reported."""

import pytest
import torch

from megatron_packed.config.errors import ConfigError
from megatron_packed.explain.kernel_reasons import (
    check_kernels,
    chosen_kernels,
    slow_kernel_warnings,
)
from support.kernel_calls import called_in_a_step, config_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.mark.parametrize(
    ("pattern", "flags", "training"),
    [
        ("GM*-E", (), {"bf16": True}),
        ("M*-E", (), {"bf16": True, "attention_backend": "sdpa", "ssd_backend": "reference"}),
        ("M*-E", (), {"bf16": True, "attention_backend": "reference", "conv_backend": "reference"}),
        ("ME", (), {"bf16": True}),
        ("ME", ("--swiglu",), {"bf16": True}),
        ("ME", (), {}),
        ("G", (), {}),
        ("G", (), {"bf16": True, "gated_delta_rule_backend": "reference"}),
        ("*-", (), {"bf16": True, "deterministic_mode": True}),
    ],
)
def test_what_is_named_is_what_runs(monkeypatch, pattern, flags, training) -> None:
    config = config_of(pattern, flags, device="auto", **training)
    called = called_in_a_step(monkeypatch, config, DEVICE)
    chosen = {kernel.op.name: {kernel.name} for kernel in chosen_kernels(config, DEVICE)}
    for op in ("dense_mlp", "residual_projection"):
        if chosen.get(op) == {"torch"}:  # The layers call their modules, and there is no function.
            del chosen[op]
    assert called == chosen


def test_products_in_float32_have_no_fast_kernels() -> None:
    """Attention, router and experts run references, which the run reports with a cure, or refuses."""
    config = config_of(device="auto")
    said = "\n".join(slow_kernel_warnings(chosen_kernels(config, DEVICE), DEVICE))
    assert (
        "attention runs reference, plain PyTorch, taking 56 times as long as flash_attn_4 (measured on an H200)"
        in said
    )
    assert (
        "grouped product runs reference, plain PyTorch, taking 36 times as long as quack_joined"
        in said
    )
    assert "router runs reference, plain PyTorch" in said
    assert said.count("; add --bf16.") == 3 == len(said.splitlines())
    with pytest.raises(ConfigError, match=r"^--require-fast-kernels: attention runs reference"):
        check_kernels(config_of(device="auto", require_fast_kernels=True), DEVICE)


def test_a_head_that_a_named_kernel_does_not_take_is_refused() -> None:
    config = config_of(
        "*", device="auto", bf16=True, attention_backend="torch_varlen", deterministic_mode=True
    )
    with pytest.raises(
        ConfigError,
        match=r"^--attention-backend torch_varlen: .*no deterministic option; leave it out",
    ):
        chosen_kernels(config, DEVICE)
    wide = config_of(
        "*", ("--kv-channels", "264"), device="auto", bf16=True, attention_backend="torch_varlen"
    )
    with pytest.raises(
        ConfigError, match=r"the head dimension \(264\) must be a multiple of 8 up to 256; leave"
    ):
        chosen_kernels(wide, DEVICE)
