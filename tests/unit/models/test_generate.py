"""Generation with cached states: logits of every step, batches, sampling, and refusals."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_packed.models import generate as module
from megatron_packed.models.decoder import Decoder
from megatron_packed.models.generate import generate
from megatron_packed.models.sampling import Sampling, next_tokens
from megatron_packed.ops.varlen_attention.api import varlen_attention
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases
from support import tiny_graph_jobs

LENGTHS = [1, 3, 2, 17, cases.CHUNK, 5, 62]
"""Prompts of one token, shorter than the convolution, of one chunk, and near a cache block."""
STEPS = 5
MODELS = {
    **{pattern: (pattern, {}) for pattern in cases.PATTERNS},
    **{name: ("M*-E", changes) for name, changes in cases.VARIANTS.items()},
    "bias": ("*-", {"add_bias_linear": True, "position_embedding_type": "rope"}),
    "one key head": ("*M", {"num_query_groups": 1, "mamba_num_groups": 1}),
    "depths": ("ME*/*E/*E", {"mtp_use_repeated_layer": True}),
    "adapters": ("M*-GE", {"lora_rank": 2, "lora_dropout": 0.5}),
}


def prompts_of(lengths=LENGTHS):
    return [[int(token) for token in tokens] for tokens, _ in cases.make_documents(lengths)]


def last_logits(model, tokens):
    """Return the logits after ``tokens`` from one training forward pass."""
    packed = PackedSeqParams.from_lengths([len(tokens)], len(tokens))
    with torch.no_grad():
        return model.logits(torch.tensor(tokens, dtype=torch.int32), packed)[-1]


@pytest.mark.parametrize("pattern, changes", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_recomputing_the_prefix(pattern, changes):
    """Each step gives the logits of a forward pass over the complete text, also after documents
    left the batch."""
    model = cases.tiny_model(pattern, **changes)
    trained = [parameter for name, parameter in model.named_parameters() if name.endswith("lora.B")]
    for factor in trained:
        torch.nn.init.normal_(factor, std=0.1)
    decoder, texts = Decoder(model.train()), prompts_of()
    assert all(part.training for part in model.modules())
    assert bool(trained) == ("lora_rank" in changes)
    model.eval()
    logits = decoder.prefill(texts)
    for step in range(STEPS):
        expected = torch.stack([last_logits(model, text) for text in texts])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        if step == 2:
            rows = [0, 2, 3, 6]
            decoder.keep(rows)
            texts, expected = [texts[row] for row in rows], expected[rows]
        tokens = expected.argmax(-1).tolist()
        texts = [[*text, token] for text, token in zip(texts, tokens)]
        logits = decoder.step(tokens)


def test_an_attention_that_draws_random_numbers_moves_no_generator(monkeypatch):
    """cuDNN's attention in TransformerEngine advances the generator without any dropout."""
    calls = []

    def draws(*arguments, **options):
        calls.append(torch.rand(3))
        return varlen_attention(*arguments, **options)

    monkeypatch.setattr("megatron_packed.layers.attention.varlen_attention", draws)
    model, state = cases.tiny_model("M*-"), torch.get_rng_state()
    generate(model, prompts_of(), 2)
    assert calls and torch.equal(torch.get_rng_state(), state)


def test_a_batch_gives_the_answers_of_single_prompts(monkeypatch):
    """Answers of a batch equal those of single prompts and of recomputing, whatever the batches.

    The model keeps its mode and its random state, although it has dropout.
    """
    model = cases.tiny_model("M*-E", position_embedding_type="rope", hidden_dropout=0.3).train()
    prompts, state, streamed = prompts_of(), torch.get_rng_state(), []
    answers = generate(model, prompts, 6, on_token=lambda *new: streamed.append(new))
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert generate(model, [prompt], 6) == [answer]
        assert [token for at, token in streamed if at == number] == answer
    assert all(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(module, "BATCH_TOKENS", 20)
    assert generate(model, prompts, 6) == answers
    model.eval()
    text = list(prompts[3])
    for token in answers[3]:
        assert int(last_logits(model, text).argmax()) == token
        text.append(token)


def test_an_answer_stops_after_an_end():
    model, prompts = cases.tiny_model("M*-"), prompts_of()
    answers = generate(model, prompts, 6)
    ends = {answers[0][2], answers[1][0]}
    for answer, whole in zip(generate(model, prompts, 6, ends=ends), answers, strict=True):
        stop = next((at for at, token in enumerate(whole) if token in ends), 5)
        assert answer == whole[: stop + 1]
    assert generate(model, prompts, 0) == [[]] * len(prompts) and generate(model, [], 5) == []


def test_experts_drop_no_token():
    """A capacity, which drops tokens in training, does not change generation."""
    model = cases.tiny_model("ME", moe_expert_capacity_factor=0.5)
    free = cases.tiny_model("ME")
    free.load_state_dict(model.state_dict())
    assert generate(model, prompts_of(), 4) == generate(free, prompts_of(), 4)


def test_draws_depend_on_seed_prompt_and_position_only():
    model, prompts = cases.tiny_model("M*-"), prompts_of()
    sampling = Sampling(temperature=1.5, top_p=0.9, seed=3)
    answers = generate(model, prompts, 6, sampling=sampling)
    assert answers == generate(model, prompts, 6, sampling=sampling)
    assert answers[0] == generate(model, prompts[:1], 6, sampling=sampling)[0]
    assert answers != generate(model, prompts, 6, sampling=replace(sampling, seed=4))
    assert answers != generate(model, prompts, 6)
    same = generate(model, [prompts[3]] * 8, 2, sampling=sampling)
    assert len({tuple(answer) for answer in same}) > 1


def test_each_position_of_a_text_has_a_draw_of_its_own(monkeypatch):
    """With equal logits everywhere, a token is the draw of its prompt's number and its position.

    The batches have two prompts, and documents leave them.
    """
    model, sampling = cases.tiny_model("-"), Sampling(temperature=1.0, seed=3)
    with torch.no_grad():
        model.output_weight.zero_()
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 2)
    prompts, even = prompts_of([3, 1, 2, 4]), torch.zeros(1, model.vocab_size)
    expected = [
        [int(next_tokens(even, sampling, [number], [len(prompt) + at])) for at in range(8)]
        for number, prompt in enumerate(prompts)
    ]
    assert all(len(set(answer)) > 4 for answer in expected)
    assert generate(model, prompts, 8, sampling=sampling) == expected
    shortened = generate(model, prompts, 8, sampling=sampling, ends={expected[0][2]})
    assert shortened[0] == expected[0][:3]
    assert all(
        answer == whole[: len(answer)] and len(answer) > 0
        for answer, whole in zip(shortened, expected)
    )


def test_draws_have_the_probabilities_of_the_logits():
    """Frequencies of 4,000 draws are the probabilities; top-p leaves out the unlikely tokens.

    At the smallest temperature the draw is the most likely token.
    """
    probabilities, count = torch.tensor([0.05, 0.5, 0.0, 0.3, 0.15]), 4000
    logits = (probabilities.log() / 2).expand(count, -1)
    for top_p, kept in ((1.0, [0, 1, 3, 4]), (0.79, [1, 3]), (0.81, [1, 3, 4]), (0.1, [1])):
        drawn = next_tokens(
            logits, Sampling(temperature=0.5, top_p=top_p), range(count), [7] * count
        )
        found = torch.bincount(drawn, minlength=5) / count
        expected = torch.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        torch.testing.assert_close(found, expected, rtol=0, atol=0.03)
        assert (found > 0).nonzero()[:, 0].tolist() == kept
    tiny = next_tokens(logits + 9, Sampling(temperature=5e-324), range(count), [7] * count)
    assert (tiny == 1).all()


def test_refusals():
    model = cases.tiny_model("*", position_embedding_type="rope", max_positions=16)
    for prompts, count, message in (
        ([[1], []], 3, r"prompts\[1\] is empty"),
        ([[]], 3, "the prompt is empty"),
        ([[1, 61]], 3, "the prompt has token numbers from 1 to 61, but the vocabulary has 61"),
        ([[1]], -1, "max_new_tokens is -1"),
        (
            [[1], [1] * 10],
            8,
            r"prompts\[1\] has 10 tokens, and 8 new tokens exceed the 16 positions",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, prompts, count)
    assert len(generate(model, [[1] * 10], 7)[0]) == 7
    for values in (
        {"temperature": -1.0},
        {"top_p": 0.0, "temperature": 1.0},
        {"temperature": float("nan")},
        {"top_p": 0.9},
    ):
        with pytest.raises(ValueError, match=next(iter(values))):
            Sampling(**values)


def test_captured_layers_run_eagerly_and_are_not_replayed():
    """With graphs of layers, answers are the same, and no graph is replayed or counted."""
    model = tiny_graph_jobs.tiny_model()
    expected = generate(model, prompts_of([3, 1]), 4)
    job = tiny_graph_jobs.Job(model, graphs=True).capture()
    pack = tiny_graph_jobs.pack([16, 20])
    before = job.step(pack)
    counts = repr(job.runner.counters)
    assert generate(model, prompts_of([3, 1]), 4) == expected
    assert repr(job.runner.counters) == counts and "replays=1," in counts
    tiny_graph_jobs.assert_equal(job.step(pack), before)


def test_a_step_processes_one_token_after_any_text():
    """The matrix products of a step do not grow with the text, except for attention scores."""
    model = cases.tiny_model("M*-E", position_embedding_type="rope")
    operations = []
    for length in (20, 200):
        decoder = Decoder(model)
        decoder.prefill(prompts_of([length, 3]))
        with FlopCounterMode(display=False) as counter:
            decoder.step([1, 2])
        operations.append(counter.get_total_flops())
    assert 0 < operations[1] <= 1.3 * operations[0]
