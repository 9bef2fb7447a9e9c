"""Host reads of a module are found on a CPU, with their place; other code is not reported."""

import inspect
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from megatron_packed.ops.varlen_attention.api import varlen_attention
from megatron_packed.packed.host_reads import host_reads
from megatron_packed.packed.params import PackedSeqParams

T, D = 8, 4


def packed() -> PackedSeqParams:
    return PackedSeqParams.from_lengths([3, 5], T)


def names(forward, *args) -> list[str]:
    """Return the reads of a forward as its source code has them, without places."""
    given = args or (torch.randn(T, D, requires_grad=True), packed())
    result, reads = host_reads(forward, given, {})
    assert isinstance(result, torch.Tensor)
    assert all(read.file == __file__ for read in reads)
    return [read.what for read in reads]


class Table:
    """Holder of a tensor that is neither a parameter nor a buffer."""

    values = torch.arange(4)


READS = {
    ".item()": lambda x, p: x * x.sum().item(),
    ".tolist()": lambda x, p: x * len(x.argmax(0).tolist()),
    ".numpy()": lambda x, p: x + torch.from_numpy(x.detach().numpy()),
    ".cpu()": lambda x, p: x.cpu() * 2.0,
    '.to("cpu")': lambda x, p: x.to("cpu") * 2.0,
    "NumPy": lambda x, p: x * float(np.asarray(x.detach()).sum()),
    "float()": lambda x, p: x * float(x.detach().sum()),
    "int()": lambda x, p: x * int(p.seq_idx.max()),
    "bool(), if or while": lambda x, p: x if x.sum() > 0 else -x,
    "an index or a range": lambda x, p: x * len(range(p.seq_idx.max())),
    "print() or a text": lambda x, p: x * len(f"{x.sum()}"),
    "in": lambda x, p: x * (3 in p.seq_idx),
    "nonzero()": lambda x, p: x[p.valid.nonzero()[:, 0]],
    "where()": lambda x, p: x[torch.where(p.valid)[0]],
    "unique()": lambda x, p: x * p.seq_idx.unique().numel(),
    "bincount()": lambda x, p: x.sum() * p.seq_idx[0].bincount(),
    "masked_select()": lambda x, p: x.masked_select(x > 0),
    "one_hot()": lambda x, p: nn.functional.one_hot(p.seq_idx[0].long()) * x[:, :1],
    "repeat_interleave() without output_size": lambda x, p: x.repeat_interleave(
        p.seq_idx[0], dim=0
    ),
    "an index by values": lambda x, p: x[x[:, 0] > 0],
    "equal()": lambda x, p: x * torch.equal(x, x),
    "allclose()": lambda x, p: x * torch.allclose(x, x),
    "zeros()": lambda x, p: x.sum() + torch.zeros(p.seq_idx.max()),
    "num_seqs": lambda x, p: x[: p.num_seqs],
    "cu_seqlens_cpu": lambda x, p: x[: int(p.cu_seqlens_cpu[1])],
}


@pytest.mark.parametrize("name", READS)
def test_a_host_read_is_found(name):
    assert names(READS[name])[0] == name


def assigned(x, index, value):
    """Return a copy with other values at an index."""
    result = x.clone()
    result[index] = value
    return result


MORE_READS = {
    "a number in a tensor": lambda x, p: x[p.seq_idx[0, 0]],
    "a border in a tensor": lambda x, p: x[: p.cu_seqlens[1]],
    "values at a mask": lambda x, p: assigned(x, p.valid, x),
    "a tensor that is no buffer": lambda x, p: x * float(Table.values.sum()),
    "a tensor on the device": lambda x, p: x * torch.zeros(2, device=x.device).sum().item(),
    "sizes as a tensor": lambda x, p: x.repeat_interleave(repeats=p.seq_idx[0], dim=0),
    "a new device by keyword": lambda x, p: x.to(device="cpu") * 1.0,
}
NO_READS = {
    "shapes": lambda x, p: x[: x.shape[0]] * len(x) * x.numel() * p.total_tokens * p.max_seqlen,
    "another dtype": lambda x, p: x.to(torch.float64).float().to(x.device),
    "a mask with one value": lambda x, p: assigned(x, p.valid, 0.0) + assigned(x, x > 1, x.sum()),
    "rows": lambda x, p: x[p.seq_idx[0].long()] + x[0] + x[:, None, 0] + x[..., :1],
    "a choice": lambda x, p: torch.where(p.valid[:, None], x, 0.0),
    "a known size": lambda x, p: x.repeat_interleave(
        torch.ones(T, dtype=torch.long, device=x.device), dim=0, output_size=T
    ),
    "known classes": lambda x, p: nn.functional.one_hot(p.seq_idx[0].long(), D) * x,
    "host tensors": lambda x, p: x * torch.tensor([2.0, 3.0]).sum().item() * len(Table.__name__),
    "host tensors in parts": lambda x, p: x * float((torch.arange(4) * 2)[1:].view(-1).max()),
}


@pytest.mark.parametrize("name", MORE_READS)
def test_other_forms_of_a_read_are_found_once(name):
    assert len(names(MORE_READS[name])) == 1


@pytest.mark.parametrize("name", NO_READS)
def test_code_that_a_graph_repeats_is_not_reported(name):
    assert names(NO_READS[name]) == []


def test_a_host_number_read_by_a_property_is_found():
    found = names(lambda x, p: x * int(p.document_lengths.max()))
    assert found == ["cu_seqlens_cpu", "num_seqs"]


def test_a_copy_to_the_host_is_reported_once():
    def forward(x, p):
        host = x.detach().cpu()
        return x * float(host.sum()) * host.max().item()

    assert names(forward) == [".cpu()"]


def test_the_place_is_the_line_of_the_caller():
    class Layer(nn.Module):
        def forward(self, x, p):
            if x.sum() > 0:  # read here
                return x * 2.0
            return x

    _, [read] = host_reads(Layer(), (torch.ones(T, D), packed()), {})
    _, first = inspect.getsourcelines(Layer.forward)
    assert (read.file, read.line) == (__file__, first + 1)
    assert str(read) == (
        f"bool(), if or while in {__file__}:{first + 1} (if x.sum() > 0:  # read here)"
    )


def test_reads_of_this_package_are_left_out():
    """Our plain attention reads lengths, which kernels of a GPU take from the device."""

    def forward(x, p):
        heads = x[:, None]
        attend = partial(varlen_attention, heads, heads, heads, backend="reference")
        return attend(p.cu_seqlens, p.max_seqlen)

    assert names(forward) == []
    assert names(lambda x, p: x * p.cu_seqlens.tolist()[1]) == [".tolist()"]


def test_the_result_and_the_gradient_are_those_of_the_function():
    x = torch.randn(T, D, requires_grad=True)
    result, _ = host_reads(lambda x, *, p: x * p.valid[:, None], (x,), {"p": packed()})
    result.sum().backward()
    assert torch.equal(x.grad, packed().valid[:, None].expand(T, D).float())
    with pytest.raises(KeyError, match="mine"):
        host_reads(lambda: {}["mine"], (), {})
    assert names(lambda x, p: x) == [] and float(torch.ones(1)) == 1.0
