"""The scan of a pack in parts within one process, which run one after the other."""

import torch

from megatron_packed.ops.parts_of_pack import PartOfPack
from megatron_packed.ops.ssd.passed_states import ssd_of_part
from support.op_packs import boundaries
from support.scan_cases import NAMES, PER_TOKEN, RESULTS, upstream


class Mail:
    """Messages between parts, of which each receives what the parts before it have sent.

    So the forward passes run from the first part to the last, and the backward passes from the last
    to the first. A part sends before it receives, so ranks can run at the same time.
    """

    def __init__(self, parts):
        self.sent = {False: [None] * parts, True: [None] * parts}
        self.started = []

    def of(self, number):
        """Return the function that starts the messages of a part."""

        def start(message_1X, *, back=False):
            self.sent[back][number] = message_1X
            others = self.sent[back][number + 1 :] if back else self.sent[back][:number]
            self.started.append(Arrived(torch.cat(others) if others else message_1X[:0]))
            return self.started[-1]

        return start

    def gradients(self, passes):
        """Run the backward passes, and return the gradients of each part in the order of the parts.

        Args:
            passes: output, inputs by name and gradient of the output, for each part.
        """
        found = [
            torch.autograd.grad(out, leaf.values(), d_out) for out, leaf, d_out in reversed(passes)
        ]
        # A rank must also wait for what it sends, since its memory is used again.
        assert all(message.waited for message in self.started)
        return found[::-1]


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
    passes = []
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
        passes.append((y, leaf, dy[own]))
    found = [
        dict(zip(RESULTS, (y.detach(), *gradients)))
        for (y, *_), gradients in zip(passes, mail.gradients(passes))
    ]
    return {
        name: torch.cat([one[name] for one in found])
        if name == "y" or name.removeprefix("d_") in PER_TOKEN
        else sum(one[name] for one in found)
        for name in RESULTS
    }
