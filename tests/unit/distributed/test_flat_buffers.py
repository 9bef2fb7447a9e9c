"""Tests of flat buffers: layout, fixed addresses, and gradients that are accumulated once."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import BufferPart, Described, FlatLayout
from support.random_tensors import normal

BF16, FP32 = BufferPart(torch.bfloat16), BufferPart(torch.float32)


class MainGradLinear(torch.autograd.Function):
    """Function that adds its weight gradient to ``main_grad`` itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad.addmm_(grad.float().t(), x.float())
        return grad @ weight, None


class Mixed(nn.Module):
    """Module with bf16 and fp32 parameters, with and without decay, of odd sizes.

    One parameter is frozen and one is never used.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))

        self.norm = make(5)
        self.weight = make(7, 5)
        self.router = make(3, 7, dtype=torch.float32)
        self.a_log = make(1, dtype=torch.float32)
        self.unused = make(2, 2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm.no_weight_decay = True
        self.a_log.no_weight_decay = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x.to(self.weight.dtype) * self.norm) @ self.weight.t()
        return (hidden.float() @ self.router.t() * self.a_log).square().sum()


def test_layout_orders_by_dtype_then_decay_and_aligns() -> None:
    layout = FlatLayout.plan(
        [
            Described("norm", (5,), BF16, False),
            Described("router", (3, 7), FP32, True),
            Described("w", (130,), BF16, True),
            Described("v", (2, 2), BF16, True),
            Described("a", (1,), FP32, False),
        ]
    )
    assert [(s.name, s.start, s.end) for s in layout.slots] == [
        ("w", 0, 130),
        ("v", 192, 196),
        ("norm", 256, 261),
        ("router", 4096, 4117),
        ("a", 4160, 4161),
    ]
    assert [(r.part, r.decay, r.start, r.end) for r in layout.ranges] == [
        (BF16, True, 0, 256),
        (BF16, False, 256, 4096),
        (FP32, True, 4096, 4160),
        (FP32, False, 4160, 8192),
    ]
    assert layout.span(BF16) == (0, 4096)
    assert layout.span(FP32) == (4096, 8192)
    assert layout.parts == [BF16, FP32] and layout.expert_numel == 0


def test_weights_of_experts_have_parts_of_their_own_in_front() -> None:
    layout = FlatLayout.plan(
        [
            Described("w", (130,), BF16, True),
            Described("fc1", (4, 1500), BufferPart(torch.bfloat16, expert=True), True),
            Described("router", (3, 7), FP32, True),
        ],
        num_owners=3,
        num_expert_owners=2,
    )
    assert [(s.name, s.start) for s in layout.slots] == [
        ("fc1", 0),
        ("w", 8192),
        ("router", 8192 + 3 * 4096),
    ]
    assert layout.expert_numel == 8192 and layout.numel == 8192 + 6 * 4096
    of_experts, low, high = layout.buckets
    assert [bucket.part for bucket in layout.buckets] == [
        BufferPart(torch.bfloat16, expert=True),
        BF16,
        FP32,
    ]
    assert layout.owned_span(of_experts, 1) == (4096, 8192) and layout.owned_span(high, 0) == (
        20480,
        24576,
    )
    assert layout.owned_span(low, 2) == (8192 + 2 * 4096, 8192 + 3 * 4096)
    owned = layout.owned_ranges(rank=2, expert_rank=1)
    assert [(r.start, r.end) for r in owned] == [(4096, 8192), (16384, 20480), (28672, 32768)]


@pytest.mark.parametrize("num_owners", [1, 2, 3, 4])
def test_shards_have_one_size_cut_parameters_and_cover_everything_once(num_owners: int) -> None:
    parameters = [
        Described("long", (70, 119), BF16, True),
        Described("norm", (5,), BF16, False),
        Described("router", (3, 7), FP32, True),
        Described("longer", (67, 191), FP32, False),
    ]
    layout = FlatLayout.plan(parameters, num_owners)
    owned = [layout.owned_ranges(rank) for rank in range(num_owners)]
    for part in (BF16, FP32):
        [bucket] = [bucket for bucket in layout.buckets if bucket.part == part]
        spans = [layout.owned_span(bucket, rank) for rank in range(num_owners)]
        assert {(end - start) % 4096 for start, end in spans} == {0} and len(
            {e - s for s, e in spans}
        ) == 1
        assert [spans[0][0], *(end for _, end in spans)] == [
            *(start for start, _ in spans),
            layout.span(part)[1],
        ]
    pieces = sorted((item for ranges in owned for item in ranges), key=lambda item: item.start)
    assert pieces[0].start == 0 and pieces[-1].end == layout.numel
    assert all(one.end == two.start for one, two in pairwise(pieces))
    for piece in pieces:
        assert any(
            (r.part, r.decay) == (piece.part, piece.decay)
            and r.start <= piece.start
            and piece.end <= r.end
            for r in layout.ranges
        )
    cuts = {
        layout.owned_span(bucket, rank)[0]
        for bucket in layout.buckets
        for rank in range(1, num_owners)
    }
    assert num_owners == 1 or any(
        slot.start < cut < slot.end for slot in layout.slots for cut in cuts
    )


def test_buckets_end_at_parameters_and_keep_small_ones_apart() -> None:
    """Check the buckets of three layers: two matrices per bucket, then the norms.

    A part below the bucket size is one bucket.
    """
    matrices = [Described(f"w{n}", (50, 100), BF16, True) for n in range(3)]
    norms = [Described(f"n{n}", (100,), BF16, False) for n in range(3)]
    small = (("a", 5, True), ("b", 5, False), ("none", 0, False))
    scalars = [Described(name, (numel,), FP32, decay) for name, numel, decay in small]
    layout = FlatLayout.plan([*matrices, *norms, *scalars], num_owners=2, bucket_elements=6000)
    names = [
        [slot.name for slot in layout.slots if slot.bucket == number]
        for number in range(len(layout.buckets))
    ]
    assert names == [["w0", "w1"], ["w2"], ["n0", "n1", "n2"], ["a", "b", "none"]]
    assert [(b.start, b.end) for b in layout.buckets] == [
        (0, 16384),
        (16384, 24576),
        (24576, 32768),
        (32768, 40960),
    ]
    for slot in layout.slots:
        bucket = layout.buckets[slot.bucket]
        assert slot.part == bucket.part and bucket.start <= slot.start <= slot.end <= bucket.end
    assert [(r.start, r.end, r.bucket) for r in layout.ranges] == [
        (0, 16384, 0),
        (16384, 24576, 1),
        (24576, 32768, 2),
        (32768, 32832, 3),
        (32832, 40960, 3),
    ]
    assert [(r.start, r.end) for r in layout.owned_ranges(1)] == [
        (8192, 16384),
        (20480, 24576),
        (28672, 32768),
        (36864, 40960),
    ]
    whole = FlatLayout.plan([*matrices, *norms, *scalars], num_owners=2)
    assert len(whole.buckets) == 2 and [slot.name for slot in whole.slots] == [
        slot.name for slot in layout.slots
    ]


def test_parameters_become_aligned_views_with_the_same_values() -> None:
    reference, module = Mixed(), Mixed()
    identities = {name: id(p) for name, p in module.named_parameters()}
    frozen_address = module.frozen.data_ptr()
    buffers = FlatBuffers(module)
    for name, p in module.named_parameters():
        assert id(p) == identities[name]
        assert torch.equal(p, reference.get_parameter(name))
    for slot in buffers.layout.slots:
        p = buffers.parameters[slot.name]
        view = buffers.param_view(slot)
        assert (
            view.data_ptr() == p.data_ptr()
            and p.data_ptr() % 128 == 0
            and p.main_grad.data_ptr() % 128 == 0
        )
        assert p.main_grad.shape == p.shape and p.main_grad.dtype == torch.float32
        view.fill_(2.0)
        assert (p == 2).all()
    assert module.frozen.data_ptr() == frozen_address and "frozen" not in buffers.parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_accumulate_in_float32_over_micro_batches(dtype: torch.dtype) -> None:
    reference, module = Mixed(dtype), Mixed(dtype)
    buffers = FlatBuffers(module)
    batches = [normal(4, 5, seed=i) for i in range(3)]
    expected = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
    for x in batches:
        module(x).backward()
        reference.zero_grad()
        reference(x).backward()
        for name, p in reference.named_parameters():
            if p.grad is not None:
                expected[name] += p.grad.float()
    for name, p in buffers.parameters.items():
        assert p.grad is None
        assert torch.equal(p.main_grad, expected[name]), name
    assert not module.unused.main_grad.any() and module.weight.main_grad.any()
    # The flat buffer contains only gradients: the padding is still zero.
    assert buffers.grads.count_nonzero() == sum(int(e.count_nonzero()) for e in expected.values())


def test_a_layer_that_writes_main_grad_is_not_counted_twice() -> None:
    """Check a tied weight that gets gradients in both ways.

    Autograd accumulates the gradient of the embedding. The output layer adds its gradient to
    ``main_grad`` itself.
    """
    embedding, output = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    output.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "output": output})
    tokens = torch.tensor([1, 3, 3, 10])
    (embedding(tokens) @ output.weight.t()).square().sum().backward()
    expected = embedding.weight.grad.clone()
    buffers = FlatBuffers(model)
    assert list(buffers.parameters) == ["embedding.weight"] and embedding.weight.grad is None
    MainGradLinear.apply(embedding(tokens), output.weight).square().sum().backward()
    torch.testing.assert_close(embedding.weight.main_grad, expected, rtol=1e-6, atol=1e-6)
    assert output.weight.grad is None and output.weight.main_grad.any()


def test_addresses_are_fixed() -> None:
    module = Mixed()
    buffers = FlatBuffers(module, extras={"loss": 1})

    def addresses() -> list[int]:
        tensors = [
            *buffers.parameters.values(),
            *(p.main_grad for p in buffers.parameters.values()),
        ]
        return [
            t.data_ptr()
            for t in [*tensors, buffers.extras["loss"], buffers.storage, *buffers.params.values()]
        ]

    before = addresses()
    for _ in range(3):
        buffers.zero_grad()
        module(torch.randn(4, 5)).backward()
        buffers.all_reduce(ParallelGroups.single())
    module.load_state_dict(
        {name: torch.full_like(v, 0.5) for name, v in module.state_dict().items()}
    )
    assert (module.weight == 0.5).all()
    assert addresses() == before
    buffers.check_addresses()
    module.weight.data = module.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"parameter weight is no longer in its flat buffer"):
        buffers.check_addresses()


def test_zero_grad_clears_gradients_extras_and_counters() -> None:
    module = Mixed()
    buffers = FlatBuffers(
        module, extras={"loss": 1, "none": 0, "flags": 3}, counters={"experts": 2}
    )
    assert buffers.extras["flags"].shape == (3,) and buffers.extras["none"].shape == (0,)
    buffers.extras["flags"][1] = 4.0
    buffers.counters["experts"].add_(torch.tensor([1, 5]))
    module(torch.randn(4, 5)).backward()
    assert not buffers.grads[-1] and buffers.storage.sum() != 0
    buffers.zero_grad()
    assert buffers.storage.count_nonzero() == 0


def test_counters_are_exact_above_two_to_the_24() -> None:
    buffers = FlatBuffers(nn.Linear(2, 2), counters={"experts": 2})
    counter = buffers.counters["experts"]
    total = [0, 0]
    for a, b in [(2**24 + 1, 3), (123_456_789, 0), (1, 2**33 - 7)]:
        counter.add_(torch.tensor([a, b]))
        total = [total[0] + a, total[1] + b]
    assert counter.value().tolist() == total
    # Simulate nine more ranks with the same counts, summed in float32 as in an all-reduce.
    one = buffers.storage.clone()
    for _ in range(9):
        buffers.storage.add_(one)
    assert buffers.storage.dtype == torch.float32
    assert counter.value()[0] == 10 * total[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Linear(2, 2, dtype=torch.float16),
            r"weight has dtype torch.float16; train in torch.bfloat16",
        ),
        (lambda: nn.ReLU(), "no parameter that requires a gradient"),
        (
            lambda: shared_memory(),
            "first and second are different Parameter objects over the same memory",
        ),
    ],
)
def test_refusals_name_the_parameter(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatBuffers(make())


def shared_memory() -> nn.Module:
    module = nn.Module()
    module.first = nn.Parameter(torch.zeros(4))
    module.second = nn.Parameter(module.first.data)
    return module
