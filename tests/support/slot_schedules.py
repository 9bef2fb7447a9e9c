"""Orders of forward and backward passes with two micro-batches in flight."""

from support.foreign_chain import hidden_states
from support.tiny_graph_jobs import T, pack

PACKS = [[10, 20], [5, 6, 7], [T], [1] * 4, [30, 34]]


def parsed(text):
    return [(step[0], int(step[1:]) - 1) for step in text.split()]


def run(chain, schedule, place):
    """Return outputs, gradients of the hidden states and gradients of the weights of a schedule."""
    chain.buffers.zero_grad()
    hidden, outputs, found = {}, {}, {}
    for what, number in schedule:
        if what == "F":
            hidden[number] = hidden_states(number)
            packed = place(
                pack(PACKS[number], seed=number, capture_sizes=chain.runner.capture_sizes)
            ).packed
            outputs[number] = chain.forward(hidden[number], packed)
        else:
            output = outputs.pop(number)
            output.square().sum().backward()
            found[number] = [output.detach().clone(), hidden[number].grad]
    return [
        *(tensor for number in sorted(found) for tensor in found[number]),
        chain.buffers.grads.clone(),
    ]
