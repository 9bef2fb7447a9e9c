"""Tests of shortened conversations and prompts: the turns and tokens that stay, and the counts."""

import hashlib
import json

import numpy as np
import pytest

from megatron_packed.data.errors import BadLine
from megatron_packed.data.sources.cache_manifest import FORMAT
from megatron_packed.data.sources.jsonl_lines import MAX_LINE_BYTES
from megatron_packed.data.sources.line_schema import Conversation, PromptCompletion
from megatron_packed.data.sources.source_files import file_identity
from megatron_packed.data.tokenizers.base import ByteTokenizer, NullTokenizer
from megatron_packed.data.tokenizers.chat_format import IdentityFormat, TemplateFormat
from megatron_packed.data.tokenizers.encode import Cut, EncodedDocument, SampleEncoder
from megatron_packed.data.tokenizers.shorten_conversations import ShorteningEncoder
from support.data_helpers import (
    byte_level,
    conversation,
    marked,
    metaspace,
    open_lines,
    save_tokenizer,
)

BYTES = ByteTokenizer()
CHATML = TemplateFormat(None, BYTES)
EARLIER = TemplateFormat(None, BYTES, answer_end="document")
"""Targets of earlier versions: the end of the document follows the last turn."""
LLAMA_2 = """{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' -}}
{% elif m.role == 'system' %}{{ m.content }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "find"}}]
WITH_TOOLS = """{% if tools %}{{ '<|im_start|>tools ' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + ' ' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}
{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}
{%- endfor -%}
{{ '<|im_start|>assistant ' if add_generation_prompt }}"""

NO_GENERATION_PROMPT = """{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""


def message(role: str, content: str, **fields) -> dict:
    return {"role": role, "content": content, **fields}


def talk(turns: int = 40, system: str | None = "Be brief.", **fields) -> Conversation:
    """Return a conversation of turns of different lengths, each with its number in the text."""
    messages = [] if system is None else [message("system", system)]
    for number in range(turns):
        messages.append(message("user", f"question {number} " + "why " * (number * 7 % 11)))
        messages.append(message("assistant", f"answer {number} " + "so " * (number * 5 % 13)))
    return Conversation(messages, **fields)


def whole(sample, chat=CHATML, tokenizer=BYTES) -> EncodedDocument:
    [[document]] = SampleEncoder(tokenizer=tokenizer, chat=chat).encode([[sample]])
    return document


def shorten(sample, limit: int, chat=CHATML, tokenizer=BYTES) -> EncodedDocument:
    [outcome] = ShorteningEncoder(tokenizer=tokenizer, chat=chat, max_tokens=limit).encode(
        [[sample]]
    )
    assert not isinstance(outcome, BadLine), outcome
    [document] = outcome
    assert document.ids.dtype == np.int32 and document.targets.dtype == np.uint8
    assert 2 <= len(document.ids) <= limit and len(document.ids) == len(document.targets)
    assert document.targets[0] == 0
    return document


def latest(sample: Conversation, turns: int) -> Conversation:
    """Return the system message and the given number of latest turns of `talk`."""
    head = [m for m in sample.messages if m["role"] == "system"]
    return sample._replace(messages=[*head, *sample.messages[-2 * turns :]])


def same(document: EncodedDocument, expected: EncodedDocument) -> bool:
    return (
        document.ids.tolist() == expected.ids.tolist()
        and document.targets.tolist() == expected.targets.tolist()
    )


# -------------------------------------------------------------------------------------------------------
# whole turns


@pytest.mark.parametrize("limit", [200, 300, 777, 1500])
@pytest.mark.parametrize("kind", ["system", "no system", "tools"])
def test_the_system_message_and_the_latest_turns_that_fit_stay(limit: int, kind: str) -> None:
    sample = talk(
        system=None if kind == "no system" else "Be brief.",
        tools=TOOLS if kind == "tools" else None,
    )
    chat = TemplateFormat(WITH_TOOLS, BYTES) if kind == "tools" else CHATML
    document = shorten(sample, limit, chat)
    kept = next(
        turns for turns in range(39, 0, -1) if len(whole(latest(sample, turns), chat).ids) <= limit
    )
    assert same(document, whole(latest(sample, kept), chat))
    assert len(whole(latest(sample, kept + 1), chat).ids) > limit
    before = whole(sample, chat)
    assert document.cut == Cut(len(before.ids), int(before.targets.sum()), turns=40 - kept)
    chat.close()


def test_at_the_limit_and_one_token_beside_it() -> None:
    sample = talk(12)
    sizes = [len(whole(latest(sample, turns)).ids) for turns in range(1, 13)]
    for turns in range(2, 12):
        for beside, kept in ((-1, turns - 1), (0, turns), (1, turns)):
            assert same(shorten(sample, sizes[turns - 1] + beside), whole(latest(sample, kept))), (
                turns,
                beside,
            )
    assert shorten(sample, sizes[11]).cut is None  # it fits
    assert shorten(sample, sizes[11] - 1).cut.turns == 1


@pytest.mark.parametrize("chat", [CHATML, EARLIER])
def test_what_follows_the_turn_of_the_last_answer_is_left_out_first(chat) -> None:
    """A document that ends with the end-of-document token contains text after the last answer."""
    sample = talk(3)
    trailing = sample._replace(messages=[*sample.messages, message("user", "and one more thing?")])
    size = len(whole(sample, chat).ids)
    document = shorten(trailing, size, chat)
    assert same(document, whole(sample, chat)._replace(cut=document.cut))
    assert document.cut is None if chat is CHATML else document.cut.turns == 1
    assert same(shorten(trailing, size - 1, chat), whole(latest(sample, 2), chat))
    alone = Conversation([*sample.messages[:3], message("user", "x" * 500)])
    assert same(shorten(alone, 200, chat), whole(Conversation(sample.messages[:3]), chat))


def test_whole_turns_keep_their_ends_and_cut_prompts_their_headers() -> None:
    """The text is written out: each answer ends once, and nothing follows the last one."""
    user, assistant = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    sample = Conversation([message(role, text) for text in "012" for role in ("user", "assistant")])
    two = f"{user}1{assistant}[1<|im_end|>]\n{user}2{assistant}[2<|im_end|>]"
    size = len(whole(sample).ids)
    assert marked(BYTES, shorten(sample, size - 1)) == two
    long = Conversation([message("user", "0123456789" * 9), message("assistant", "yes")])
    expected = f"{user}6789{assistant}[yes<|im_end|>]"
    limit = len(whole(long).ids) - 86
    assert marked(BYTES, shorten(long, limit)) == expected


def test_calls_stay_with_their_results_and_a_turn_keeps_all_of_its_answers() -> None:
    use = [
        message("user", "where?"),
        message("assistant", "I look.", tool_calls=[{"name": "find", "arguments": {"what": "it"}}]),
        message("tool", "it is here " * 4),
        message("assistant", "Here."),
    ]
    chat = TemplateFormat(WITH_TOOLS, BYTES)
    sample = Conversation([message("system", "Help."), *use, *use, *use], TOOLS)
    of_turns = [
        whole(Conversation([sample.messages[0], *use * turns], TOOLS), chat) for turns in (1, 2)
    ]
    sizes = [len(document.ids) for document in of_turns]
    for limit, turns in ((sizes[0], 1), (sizes[1] - 1, 1), (sizes[1], 2)):
        assert same(shorten(sample, limit, chat), of_turns[turns - 1])
    chat.close()
    # The last message calls a tool, and the tool results follow. The results are removed only if
    # the turn does not fit with them.
    chat = TemplateFormat(WITH_TOOLS, BYTES, answer_end="document")
    open_end = Conversation([*use, *use[:3]], TOOLS)
    last = Conversation(use[:3], TOOLS)
    size = len(whole(last, chat).ids)
    assert same(shorten(open_end, size, chat), whole(last, chat))
    assert same(shorten(open_end, size - 1, chat), whole(Conversation(use[:2], TOOLS), chat))
    chat.close()


def test_the_last_answer_is_the_last_that_is_trained() -> None:
    messages = talk(6).messages
    for number in (8, 10, 12):
        messages[number] = {**messages[number], "train": False}
    kept = Conversation([messages[0], *messages[5:7]])
    document = shorten(Conversation(messages), len(whole(kept).ids))
    assert same(document, whole(kept)) and document.cut.turns == 5
    messages = talk(6).messages
    messages[10] = {**messages[10], "train": False}
    kept = Conversation([messages[0], *messages[7:]])
    untrained = whole(kept)
    assert untrained.targets.sum() < whole(latest(talk(6), 3)).targets.sum()
    assert same(shorten(Conversation(messages), len(untrained.ids)), untrained)


def test_first_answers_without_a_question_and_users_who_write_twice() -> None:
    greeting = Conversation([message("assistant", "hello " * 9), *talk(2, system=None).messages])
    assert same(shorten(greeting, len(whole(greeting).ids) - 1), whole(talk(2, system=None)))
    messages = talk(2, system=None).messages
    twice = Conversation([*messages[:3], message("user", "please"), messages[3]])
    assert same(shorten(twice, len(whole(twice).ids) - 1), whole(Conversation(twice.messages[2:])))
    assert same(
        shorten(twice, len(whole(Conversation(twice.messages[2:])).ids) - 1),
        whole(Conversation(twice.messages[3:])),
    )


def test_turns_that_grow_with_the_turns_before_them_are_tried_and_not_only_estimated() -> None:
    source = "{% for m in messages %}{{ loop.index ~ '. ' + m.role + ' ' }}{% if m.role == 'assistant' %}"
    source += "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    numbered = TemplateFormat(source + "{% endfor %}", BYTES)
    sample = talk(60, system=None)
    for turns in (5, 6, 49, 50, 51):
        expected = whole(latest(sample, turns), numbered)
        assert same(shorten(sample, len(expected.ids), numbered), expected), turns
    numbered.close()


def test_few_renderings_find_the_turns(monkeypatch) -> None:
    """The number of turns that fit is found with few renderings, so that long data stays fast."""
    rendered = []

    class Everything(IdentityFormat):  # all text is trained, so targets do not mark answers
        def pieces(self, sample: Conversation):
            rendered.append(1)
            return super().pieces(sample)

    pieces = TemplateFormat.pieces
    monkeypatch.setattr(
        TemplateFormat, "pieces", lambda self, sample: rendered.append(1) or pieces(self, sample)
    )
    for limit in range(300, 3000, 90):
        shorten(talk(80), limit)
    assert len(rendered) / 30 <= 1 + 1.5
    rendered.clear()
    messages = talk(300, system=None).messages
    shorten(Conversation([message("user", "x" * 100_000), *messages]), 2000, Everything())
    assert len(rendered) <= 1 + 4 + 9, len(rendered)


# -----------------------------------------------------------------------------------------------
# cuts inside a turn

ONE_TURN = Conversation(
    [
        message("system", "Be nice."),
        message("user", "0123456789" * 4),
        message("assistant", "ok, then"),
    ]
)
SYSTEM = len("Be nice.") + 2 + len("system\n") + 1 + 1 + len("user\n")
"""Number of tokens before the user's text: system message, line end and header of the user."""
HEADER, ANSWER = 1 + len("assistant\n"), len("ok, then") + 1
"""Number of tokens of the answer's header, and of the answer with the end of its turn."""


def test_a_last_turn_that_is_too_long_loses_the_front_of_its_prompt() -> None:
    text = "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    for prompt in ("4567890123456789", "9"):
        document = shorten(ONE_TURN, SYSTEM + len(prompt) + 2 + HEADER + ANSWER)
        assert marked(BYTES, document) == text.format(prompt) + "[ok, then<|im_end|>]"
        assert document.cut == Cut(len(whole(ONE_TURN).ids), 9, inside=True)
    for content in ("a123456789" * 4, "  <|im_end|>" * 4):
        sample = Conversation(
            [ONE_TURN.messages[0], message("user", content), ONE_TURN.messages[2]]
        )
        document = shorten(sample, SYSTEM + 9 + 2 + HEADER + ANSWER)
        assert marked(BYTES, document).startswith(text.format(content[-9:])), content
    tail = text.format("").removeprefix("<|im_start|>system\nBe n")
    document = shorten(ONE_TURN, SYSTEM - 12 + HEADER + ANSWER)
    assert marked(BYTES, document) == tail.replace(
        "<|im_end|>\n<|im_start|>assistant", "<|im_start|>assistant"
    ) + ("[ok, then<|im_end|>]")


def test_an_answer_is_cut_at_its_end_and_only_where_it_alone_does_not_fit() -> None:
    before, after = whole(ONE_TURN), slice(-ANSWER, None)
    for limit in range(2, len(before.ids)):
        document = shorten(ONE_TURN, limit)
        kept = min(ANSWER, limit - 1)
        assert len(document.ids) == limit
        assert document.ids[-kept:].tolist() == before.ids[after][:kept].tolist(), limit
        assert document.targets[-kept:].tolist() == before.targets[after][:kept].tolist(), limit
        assert document.targets.sum() == before.targets[after][:kept].sum()
        assert document.cut.answer == (kept < ANSWER)


@pytest.mark.parametrize("refused", ["< 9", "in (5, 7)"])
def test_where_the_template_refuses_shorter_conversations_tokens_of_the_whole_are_cut(
    refused: str,
) -> None:
    sample = talk(4)
    source = f"{{% if messages | length {refused} and not add_generation_prompt %}}{{{{ raise_exception('no') }}}}"
    source += "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}{% if m.role == 'assistant' %}"
    source += "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    source += "{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    chat = TemplateFormat(source, BYTES)
    before = whole(sample, chat)
    system = len("_system Be brief.__user ")
    document = shorten(sample, 250, chat)
    assert document.ids.tolist() == [*before.ids[:system], *before.ids[-(250 - system) :]]
    assert document.targets.tolist() == [
        *before.targets[:system],
        *before.targets[-(250 - system) :],
    ]
    assert (
        document.targets.sum() > whole(latest(talk(4), 1)).targets.sum()
    )  # the kept text includes targets of earlier answers
    assert document.cut == Cut(len(before.ids), int(before.targets.sum()), inside=True)
    chat.close()


def test_an_answer_stays_whole_where_the_template_takes_only_the_whole_and_messages_follow_it() -> (
    None
):
    source = f"{{% if messages | length < 5 %}}{{{{ raise_exception('no') }}}}{{% endif %}}{NO_GENERATION_PROMPT}"
    messages = [*talk(2, system=None).messages, message("user", "thanks " * 30)]
    chat = TemplateFormat(source, BYTES, answer_end="document")
    before = whole(Conversation(messages), chat)
    end = int(np.flatnonzero(before.targets[:-1])[-1]) + 1
    ids, targets = [*before.ids[:end], BYTES.eod_id], [*before.targets[:end], 1]
    for limit in (40, len(ids)):
        document = shorten(Conversation(messages), limit, chat)
        assert document.ids.tolist() == ids[-limit:]
        assert document.targets.tolist() == [0, *targets[-limit:][1:]]
        assert document.cut == Cut(
            len(before.ids), int(before.targets.sum()), turns=1, inside=limit == 40
        )
    chat.close()


@pytest.mark.parametrize("asked", [False, True])
def test_the_header_of_an_answer_is_known_without_a_generation_prompt(asked: bool) -> None:
    chat = TemplateFormat(NO_GENERATION_PROMPT, BYTES)
    messages = [message("system", "Be brief. " * 9), message("user", "why?")] if asked else []
    before = whole(Conversation([*messages, message("assistant", "because")]), chat)
    answer, header = len("because") + 1, len("assistant: ")
    for limit in range(2, len(before.ids)):
        document = shorten(Conversation([*messages, message("assistant", "because")]), limit, chat)
        assert document.targets.sum() == min(answer, limit - 1), limit
        if limit > answer:
            end = min(limit, answer + header)
            assert document.ids[-end:].tolist() == before.ids[-end:].tolist(), limit
    chat.close()


def test_special_tokens_in_a_message_that_is_cut_stay_plain_text() -> None:
    sample = Conversation([message("user", "<|im_end|>" * 30), message("assistant", "no")])
    document = shorten(sample, 120)
    assert (document.ids == BYTES.special_tokens["<|im_end|>"]).sum() == 2
    assert len(document.ids) == 120


@pytest.mark.parametrize("trains_all", [False, True])
def test_formats_that_train_everything_and_have_no_end(trains_all: bool) -> None:
    chat = (
        TemplateFormat(None, BYTES, trains_all=True, ends_documents=True)
        if trains_all
        else IdentityFormat()
    )
    sample = talk(5)
    assert same(
        shorten(sample, len(whole(latest(sample, 2), chat).ids), chat),
        whole(latest(sample, 2), chat),
    )
    before = whole(ONE_TURN, chat)
    answer = len("ok, then") + trains_all * 2
    for limit in range(2, len(before.ids)):
        kept = min(answer, limit - 1)
        document = shorten(ONE_TURN, limit, chat)
        assert (
            document.ids[-kept:].tolist() == before.ids[len(before.ids) - answer :][:kept].tolist()
        ), limit
        assert document.targets[1:].all()


# ------------------------------------------------------------------------------------------
# prompts, and tokenizers that do not split cleanly


def test_a_prompt_loses_its_front_and_a_completion_its_end() -> None:
    sample, numbers = PromptCompletion("1 2 3 4 5 6 7", "11 12 13"), NullTokenizer(20)
    expected = {
        10: [2, 3, 4, 5, 6, 7, 11, 12, 13, 19],
        6: [6, 7, 11, 12, 13, 19],
        5: [7, 11, 12, 13, 19],
        4: [7, 11, 12, 13],
        2: [7, 11],
    }
    for limit, ids in expected.items():
        document = shorten(sample, limit, tokenizer=numbers)
        assert document.ids.tolist() == ids
        assert document.targets.tolist() == [int(token > 10) for token in ids]
        assert document.cut == Cut(11, 4, inside=True, answer=limit < 5)
    document = shorten(PromptCompletion("", "11 12 13 14"), 3, tokenizer=numbers)
    assert (document.ids.tolist(), document.targets.tolist()) == ([11, 12, 13], [0, 1, 1])


def test_a_prefix_stays_and_a_tokenizer_that_does_not_split_is_cut_by_tokens(tmp_path) -> None:
    from tokenizers import processors

    engine = byte_level(["<s>", "</s>"])
    engine.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = save_tokenizer(tmp_path / "split", engine, eos_token="</s>", bos_token="<s>")
    sample = PromptCompletion("how are you today " * 9, "I am fine.")
    before = whole(sample, tokenizer=tokenizer)
    document = shorten(sample, 30, tokenizer=tokenizer)
    assert document.ids.tolist() == [0, *before.ids[-29:]]
    unsplit = save_tokenizer(tmp_path / "whole", metaspace(), eos_token="</s>")
    assert not unsplit.splits_cleanly
    sample = PromptCompletion("how are you today " * 9 + "?", " I am fine")
    before = whole(sample, tokenizer=unsplit)
    document = shorten(sample, 20, tokenizer=unsplit)
    assert document.ids.tolist() == before.ids[-20:].tolist()
    assert (
        document.targets.tolist() == before.targets[-20:].tolist()
        and document.targets.sum() == before.targets.sum()
    )


def test_conversations_of_a_tokenizer_that_does_not_split(tmp_path) -> None:
    tokenizer = save_tokenizer(
        tmp_path, metaspace(), eos_token="</s>", bos_token="<s>", chat_template=LLAMA_2
    )
    chat = TemplateFormat(LLAMA_2, tokenizer)
    turns = [message("user", "Hello how are you"), message("assistant", "I am fine")] * 9
    two = whole(Conversation(turns[:4]), chat, tokenizer)
    for beside, kept in ((-1, 1), (0, 2), (1, 2)):
        document = shorten(Conversation(turns), len(two.ids) + beside, chat, tokenizer)
        assert same(document, whole(Conversation(turns[: 2 * kept]), chat, tokenizer))
    long = Conversation(
        [message("system", "the user"), message("user", "how are you " * 20), turns[1]]
    )
    before = whole(long, chat, tokenizer)
    document = shorten(long, 30, chat, tokenizer)
    head = len(tokenizer.encode("the user<s>[INST]", special=True))
    assert document.ids.tolist() == [*before.ids[:head], *before.ids[-(30 - head) :]]
    assert document.targets.sum() == before.targets.sum()
    chat.close()


# -----------------------------------------------------------------------------------------------------------
# data sets


def test_long_prompts_keep_every_token_of_their_answers(tmp_path) -> None:
    """Prompts of 7,000 tokens lose only tokens of the prompt; all 30 words of each answer stay."""
    answers = [[number, *range(200, 229)] for number in range(100)]
    lines = [
        json.dumps({"prompt": "5 " * 7000, "completion": " ".join(map(str, answer))})
        for answer in answers
    ]
    dataset = open_lines(tmp_path, lines, tokenizer=NullTokenizer(300), shorten_to=2048)
    assert dataset.lengths.tolist() == [2048] * 100 and dataset.target_counts.tolist() == [31] * 100
    assert (
        dataset.source_lengths.tolist() == [7031] * 100
        and dataset.source_targets.tolist() == [31] * 100
    )
    for number, answer in enumerate(answers):
        tokens, targets = dataset.document(number)
        assert tokens[-31:].tolist() == [*answer, 299] and targets.tolist() == [0] * 2017 + [1] * 31
    report = dataset.report
    assert (report.shortened, report.cut_tokens, report.cut_targets, report.cut_turns) == (
        100,
        100 * 4983,
        0,
        0,
    )
    assert (report.cut_inside, report.cut_answers) == (100, 0)
    assert any(
        "100 of them were shortened so that they keep their last answer: 498300 tokens" in line
        for line in dataset.sentences()
    )


def test_targets_of_turns_that_are_cut_away_are_counted(tmp_path) -> None:
    lines = [json.dumps({"messages": talk(turns).messages}) for turns in (40, 2, 40)]
    long = open_lines(tmp_path, lines)
    short = open_lines(tmp_path, lines, shorten_to=512)
    assert short.source_lengths.tolist() == long.lengths.tolist() == long.source_lengths.tolist()
    assert (
        short.source_targets.tolist() == long.target_counts.tolist() == long.source_targets.tolist()
    )
    assert short.lengths.max() <= 512 < long.lengths.max()
    assert short.lengths[1] == long.lengths[1]
    lost = int((short.source_targets - short.target_counts).sum())
    assert (
        0
        < lost
        == short.report.cut_targets
        == long.report.target_tokens - short.report.target_tokens
    )
    assert short.report.shortened == 2 and short.report.cut_turns % 2 == 0
    assert long.report.shortened == 0 and not any("longer" in line for line in long.sentences())
    for number in (0, 2):
        tokens, targets = short.document(number)
        assert BYTES.decode(tokens[targets == 1]).endswith(
            "answer 39 " + "so " * (39 * 5 % 13) + "<|im_end|>"
        )


def test_the_limit_decides_the_cache_only_where_documents_are_shortened(tmp_path) -> None:
    lines = [conversation("q", "a" * 300)]
    plain, longer, shorter = (
        open_lines(tmp_path, lines, shorten_to=limit) for limit in (None, 1000, 100)
    )
    chat = TemplateFormat(None, BYTES).fingerprint
    identity = [
        FORMAT,
        [file_identity(tmp_path / "data.jsonl")],
        BYTES.fingerprint,
        chat,
        True,
        MAX_LINE_BYTES,
    ]
    assert (
        plain.key == hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    )  # without a limit on lengths, the hashed inputs contain no limit
    assert [*plain.manifest["arrays"]] == ["tokens", "targets", "offsets", "target_counts"]
    assert len({plain.key, longer.key, shorter.key}) == 3
    assert (
        plain.content_hash == longer.content_hash != shorter.content_hash
    )  # a limit above all documents changes no content
