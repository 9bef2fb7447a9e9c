"""The gated delta rule of a pack in parts within one process."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from megatron_packed.ops.parts_of_pack import PartOfPack
from support.delta_rule_cases import ALL, PER_TOKEN
from support.op_packs import boundaries
from support.scan_parts import Mail


def part_of(values, lengths, number, parts, start=None):
    """Return the arguments of one part, and the part.

    Documents outside of the part have no tokens.
    """
    tokens = len(values["q"]) // parts
    begin = number * tokens
    own = [values[name][begin:][:tokens] if name in PER_TOKEN else values[name] for name in ALL]
    seq_idx_1T, cu_seqlens = boundaries(lengths, values["q"].device)
    before_1 = seq_idx_1T[0, begin - 1 : begin] if number else None
    rows = seq_idx_1T[:, begin:][:, :tokens], (cu_seqlens - begin).clamp(0, tokens)
    return (*own, *rows), PartOfPack(number, parts, before_1, start)


def gathered_in_parts(values, lengths, parts, **options):
    """Run all parts at the same time, each in a thread; they wait for the messages of all parts."""
    sent, everyone = [None] * parts, Barrier(parts)

    def run(number):
        def gather(message_1X):
            sent[number] = message_1X
            everyone.wait(60)
            return torch.cat(sent)

        arguments, part = part_of(values, lengths, number, parts)
        try:
            return gated_delta_rule(*arguments, part=part, gather=gather, **options)
        except BaseException:
            everyone.abort()
            raise

    with ThreadPoolExecutor(parts) as threads:
        return torch.cat(list(threads.map(run, range(parts))))


def upstream(values):
    """Return the gradient of the output that `delta_rule_cases.with_gradients` uses."""
    shape, device = values["v"].shape, values["v"].device
    weight = torch.linspace(-1, 1, shape.numel(), dtype=torch.float64, device=device).sin()
    return (7 * weight).sin().view(shape)


def results_in_parts(values, lengths, parts, **options):
    """Run parts that send messages; return the output of the pack and each gradient, by name."""
    tokens, weights = len(values["q"]) // parts, upstream(values)
    mail = Mail(parts)
    passes = []
    for number in range(parts):
        leaf = {name: value.detach().requires_grad_() for name, value in values.items()}
        arguments, part = part_of(leaf, lengths, number, parts, mail.of(number))
        o = gated_delta_rule(*arguments, part=part, **options)
        passes.append((o, leaf, weights[number * tokens :][:tokens].to(o.dtype)))
    sums = (sum(of_parts) for of_parts in zip(*mail.gradients(passes)))
    gradients = {f"d{name}": gradient for name, gradient in zip(ALL, sums)}
    return {"o": torch.cat([o.detach() for o, *_ in passes])} | gradients
