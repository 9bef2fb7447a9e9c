"""The scan of a pack in parts within one process: each message is recorded first, and then delivered."""

import torch

from megatron_packed.ops.parts_of_pack import PartOfPack
from megatron_packed.ops.ssd.passed_states import ssd_of_part
from support.op_packs import boundaries
from support.scan_cases import NAMES, PER_TOKEN, RESULTS, upstream


class Mail:
    """Messages between parts. Before ``delivered`` is set, a part only receives zeros.

    No message depends on a received one. So one run records all messages.
    """

    def __init__(self, parts):
        self.sent = {False: [None] * parts, True: [None] * parts}
        self.delivered = False
        self.started = []

    def of(self, number):
        """Return the function that starts the messages of a part."""

        def start(message_1X, *, back=False):
            if not self.delivered:
                self.sent[back][number] = message_1X
            others = self.sent[back][number + 1 :] if back else self.sent[back][:number]
            rows = message_1X.new_zeros(len(others), message_1X.shape[1])
            if self.delivered and others:
                rows = torch.cat(others)
            self.started.append(Arrived(rows))
            return self.started[-1]

        return start


class Arrived:
    def __init__(self, rows):
        self.rows = rows
        self.waited = False

    def wait(self):
        self.waited = True
        return self.rows


def results_in_parts(values, lengths, parts, backend="triton", restarts=True):
    """Return the output of the pack and the gradient of each input, by name."""
    tokens = len(values["x"]) // parts
    seq_idx_1T, cu_seqlens = boundaries(lengths if restarts else [sum(lengths)], values["x"].device)
    dy = upstream(values["x"])
    mail = Mail(parts)
    for mail.delivered in (False, True):
        found = []
        for number in range(parts):
            own = slice(number * tokens, (number + 1) * tokens)
            leaf = {
                name: (value[own] if name in PER_TOKEN else value).detach().requires_grad_()
                for name, value in ((name, values[name]) for name in NAMES)
            }
            before_1 = seq_idx_1T[0, own.start - 1 : own.start] if number else None
            y = ssd_of_part(
                *leaf.values(),
                seq_idx_1T[:, own],
                (cu_seqlens - own.start).clamp(0, tokens),
                part=PartOfPack(number, parts, before_1, mail.of(number)),
                entering=None,
                chunk_size=64,
                backend=backend,
            )
            gradients = torch.autograd.grad(y, leaf.values(), dy[own])
            # A rank must also wait for what it sends, since its memory is used again.
            assert all(message.waited for message in mail.started)
            found.append(dict(zip(RESULTS, (y.detach(), *gradients))))
    return {
        name: torch.cat([one[name] for one in found])
        if name == "y" or name.removeprefix("d_") in PER_TOKEN
        else sum(one[name] for one in found)
        for name in RESULTS
    }
