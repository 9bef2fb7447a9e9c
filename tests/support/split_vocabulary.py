"""Ranks that share a vocabulary, run one after the other in one process."""

import torch

from megatron_packed.ops.cross_entropy.api import VocabShard, linear_cross_entropy


class Agreement:
    """Stand-in for collectives: collects the parts of all ranks and returns results later."""

    def __init__(self):
        self.parts, self.known = {"max": [], "sum": []}, {"max": [], "sum": []}

    def shard(self, first_row, total_rows):
        counts = {"max": 0, "sum": 0}

        def collective(kind):
            def exchange(x):
                self.parts[kind].append((counts[kind], x.clone()))
                if counts[kind] < len(self.known[kind]):
                    x.copy_(self.known[kind][counts[kind]])
                counts[kind] += 1

            return exchange

        return VocabShard(
            first_row=first_row,
            total_rows=total_rows,
            sum_over_ranks=collective("sum"),
            max_over_ranks=collective("max"),
        )

    def settle(self, kind):
        """Reduce the collected parts of ``kind``; the next round gets the results."""
        calls = 1 + max(number for number, _ in self.parts[kind])
        by_call = [
            torch.stack([x for number, x in self.parts[kind] if number == call])
            for call in range(calls)
        ]
        self.known[kind] = [x.amax(0) if kind == "max" else x.sum(0) for x in by_call]
        self.parts = {"max": [], "sum": []}


def run_split(hidden, weight, labels, mask, ranks, **options):
    """Run ``ranks`` equal parts of the vocabulary.

    Three rounds are needed: the maxima are correct from the second on, the sums in the third.

    Returns:
        Loss sum, per-token loss, hidden gradient and weight gradient.
    """
    agreement, rows = Agreement(), weight.shape[0] // ranks
    for settled in ("max", "sum", None):
        results = []
        for rank in range(ranks):
            hidden_TD = hidden.detach().clone().requires_grad_()
            part_VD = weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
            shard = agreement.shard(rank * rows, weight.shape[0])
            loss, loss_T = linear_cross_entropy(
                hidden_TD, part_VD, labels, mask, shard=shard, **options
            )
            loss.backward(options.get("grad_scale"))
            results.append((loss.detach(), loss_T, hidden_TD.grad, part_VD.grad))
        if settled:
            agreement.settle(settled)
    losses, per_token, hidden_grads, weight_grads = zip(*results)
    for same in (losses, per_token):
        assert all(torch.equal(x.nan_to_num(7), same[0].nan_to_num(7)) for x in same)
    return losses[0], per_token[0], sum(hidden_grads), torch.cat(weight_grads)


def check_split(
    backend, dtype=torch.float32, ranks=4, rows=64, vocab=37, tolerance=1e-5, grad_scale=None
):
    """Compare the parts with the reference on the complete vocabulary.

    With the defaults, rank 2 has some padding rows and rank 3 has only padding.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = (3 * torch.randn(rows, 8, generator=generator, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, vocab, (7,), generator=generator, dtype=torch.int32)
    labels[2], mask = -100, torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0])
    labels[3] = vocab - 1
    with torch.no_grad():
        hidden[6] = float("nan")  # a row without a target must affect nothing
        hidden[0] *= 50  # exp of these logits overflows
    options = {"vocab_size": vocab, "chunk_tokens": 4, "grad_scale": grad_scale}
    loss, loss_T = linear_cross_entropy(
        hidden, weight, labels, mask, backend="reference", **options
    )
    want = (loss, loss_T, *torch.autograd.grad(loss, (hidden, weight), grad_scale))
    got = run_split(hidden, weight, labels, mask, ranks, backend=backend, **options)
    clean = torch.arange(7) != 6
    for name, x, y in zip(("loss", "per-token loss", "hidden", "weight"), got, want):
        if name == "weight":  # a product with a NaN row is NaN with any backend
            assert torch.equal(x.isnan(), y.isnan())
            continue
        if name == "hidden":
            assert torch.equal(x[2], torch.zeros_like(x[2]))
            x, y = x[clean], y[clean]
        error = (x.double() - y.double()).abs().max() / y.double().abs().max()
        assert error <= tolerance, (name, float(error))


def check_weight_gradient(backend, tolerance=1e-5):
    """Compare the weight gradient of a part with its rows of the complete gradient."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 8, generator=generator, requires_grad=True)
    weight = torch.randn(64, 8, generator=generator, requires_grad=True)
    labels, mask = torch.arange(9) * 4, torch.ones(9)
    options = {"vocab_size": 37, "chunk_tokens": 4}
    loss, _ = linear_cross_entropy(hidden, weight, labels, mask, backend="reference", **options)
    (want,) = torch.autograd.grad(loss, weight)
    *_, got = run_split(hidden, weight, labels, mask, 4, backend=backend, **options)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert not got[37:].any()


def check_unknown_label(backend):
    """A label outside the vocabulary makes only its own row NaN, even if it hits a padding row."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(4, 8, generator=generator), torch.randn(64, 8, generator=generator)
    labels = torch.tensor([1, 37, 63, 100])
    hidden.requires_grad_()
    _, loss_T, _, _ = run_split(
        hidden, weight, labels, torch.ones(4), 4, vocab_size=37, backend=backend
    )
    assert loss_T.isnan().tolist() == [False, True, True, True]
