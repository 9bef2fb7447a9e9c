"""Shapes for tests of the second product of adapters, and the check of a backend."""

import torch

from megatron_packed.ops.lora_expand.api import lora_expand

SHAPES = [(1, 16, 1), (128, 16, 128), (129, 8, 129), (200, 32, 300), (7, 1, 40), (3, 24, 500)]
"""T, P and O: tiles that are full, not full, and of one element."""


def check_of_kernel(tokens, columns, outputs, device):
    """Compare the kernel with float64, with and without bias, for both orders of a weight's strides."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    low_TP, bias_O = normal(tokens, columns), normal(outputs)
    for weight_OP in (normal(outputs, columns), normal(columns, outputs).t()):
        for bias in (None, bias_O):
            y_TO = lora_expand(low_TP, weight_OP, bias, backend="triton")
            want_TO = low_TP.double() @ weight_OP.double().t()
            want_TO += 0 if bias is None else bias.double()
            # One rounding of a sum in fp32.
            error_TO = (y_TO.double() - want_TO).abs()
            scale_TO = want_TO.abs() + low_TP.double().abs() @ weight_OP.double().abs().t() * 2**-12
            assert (error_TO <= scale_TO * 2**-8).all()
            # A row depends on itself only; in the interpreter also on its place in a tile, by NumPy's products.
            rows = slice(tokens // 2 if device == "cuda" else tokens // 128 * 64, None)
            alone_TO = lora_expand(low_TP[rows], weight_OP, bias, backend="triton")
            assert torch.equal(alone_TO, y_TO[rows])
            broken_TP = low_TP.clone()
            broken_TP[0, 0] = torch.nan
            broken_TO = lora_expand(broken_TP, weight_OP, bias, backend="triton")
            assert broken_TO[0].isnan().all() and torch.equal(broken_TO[1:], y_TO[1:])
