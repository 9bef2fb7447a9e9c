"""Tests of shortened conversations and prompts: the turns and tokens that stay, and the counts."""

import json
import random

import numpy as np
import pytest
from tokenizers import normalizers

from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.sources import tokenized_dataset
from megatron_packed.data.sources.line_schema import Conversation, PromptCompletion
from megatron_packed.data.sources.token_lines import TokenSequence
from megatron_packed.data.sources.tokenized_dataset import TokenizedDataset
from megatron_packed.data.tokenizers.base import ByteTokenizer, NullTokenizer
from megatron_packed.data.tokenizers.chat_format import IdentityFormat, TemplateFormat, chat_format
from megatron_packed.data.tokenizers.encode import Cut, EncodedDocument, SampleEncoder
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.data.tokenizers.shorten_conversations import ShorteningEncoder
from support.data_helpers import (
    byte_level,
    conversation,
    marked,
    metaspace,
    open_lines,
    samples_of,
    save_tokenizer,
)
from support.messages import message
from support.template_conversations import (
    DATE,
    STRUCTURES,
    Structure,
    conversations,
    write_tokenizer,
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


def talk(turns: int = 40, system: str | None = "Be brief.", **fields) -> Conversation:
    """Return a conversation of turns of different lengths, each with its number in the text."""
    messages = [] if system is None else [message("system", system)]
    for number in range(turns):
        messages.append(message("user", f"question {number} " + "why " * (number * 7 % 11)))
        messages.append(message("assistant", f"answer {number} " + "so " * (number * 5 % 13)))
    return Conversation(messages, **fields)


def whole(sample, chat=CHATML, tokenizer=BYTES) -> EncodedDocument:
    [line] = SampleEncoder(tokenizer=tokenizer, chat=chat).encode([[sample]])
    assert not isinstance(line, BadLine), line
    [document] = line.documents
    return document


def shorten(sample, limit: int, chat=CHATML, tokenizer=BYTES) -> EncodedDocument:
    [outcome] = ShorteningEncoder(tokenizer=tokenizer, chat=chat, max_tokens=limit).encode(
        [[sample]]
    )
    assert not isinstance(outcome, BadLine), outcome
    [document] = outcome.documents
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


def test_whole_turns_keep_their_ends() -> None:
    """The text is written out: each answer ends once, and nothing follows the last one."""
    user, assistant = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    sample = Conversation([message(role, text) for text in "012" for role in ("user", "assistant")])
    two = f"{user}1{assistant}[1<|im_end|>]\n{user}2{assistant}[2<|im_end|>]"
    size = len(whole(sample).ids)
    assert marked(BYTES, shorten(sample, size - 1)) == two


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

STORY = " ".join(f"word{number}" for number in range(200))
ASKED = "What is the text about? Answer in one word, because a program reads the answer and knows no other words."
SUMMARY = Conversation(
    [
        message("system", "Be nice."),
        message("user", f"Summarise:\n{STORY}\n\n{ASKED}"),
        message("assistant", "ok, then"),
    ]
)
TEXT = (
    "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\n{}"
    "<|im_end|>\n<|im_start|>assistant\n[ok, then<|im_end|>]"
)


def left_out(sample, limit: int, chat=CHATML, tokenizer=BYTES) -> bool:
    encoder = ShorteningEncoder(tokenizer=tokenizer, chat=chat, max_tokens=limit)
    [outcome] = encoder.encode([[sample]])
    return isinstance(outcome, BadLine) and outcome.reason == "question_too_long"


def text_of(document: EncodedDocument, tokenizer=BYTES) -> str:
    return tokenizer.decode(document.ids)


def middle_cut(text: str, kept: int) -> str:
    """Return ``text`` with ``kept`` characters, as many of its beginning as of its end."""
    return text[: (kept + 1) // 2] + text[len(text) - kept // 2 :]


@pytest.mark.parametrize("kept", [1400, 301, 2, 1, 0])
def test_a_long_user_message_keeps_its_beginning_and_its_question(kept: int) -> None:
    content = SUMMARY.messages[1]["content"]
    passage = content.removesuffix(ASKED)
    size = len(whole(SUMMARY).ids)
    document = shorten(SUMMARY, size - len(passage) + kept)
    assert marked(BYTES, document) == TEXT.format(middle_cut(passage, kept) + ASKED)
    assert document.cut == Cut(size, 9, inside=True, question=True)


def test_the_input_is_cut_and_never_the_instruction() -> None:
    """Lines with ``instruction`` put the question before the text."""
    question = "Who is the thief in this story? " * 20  # longer than what any other message keeps
    sample = Conversation(
        [message("user", f"{question}\n\n{STORY}"), message("assistant", "Tom")],
        instruction=question,
    )
    size = len(whole(sample).ids)
    for kept in (1000, 3, 0):
        document = shorten(sample, size - len(STORY) + kept)
        content = question + "\n\n" + middle_cut(STORY, kept)
        assert f"user\n{content}<|im_end|>" in text_of(document)
        assert document.cut.question and not document.cut.answer
    document = shorten(sample, size - len(STORY) - 3)
    assert question in text_of(document) and document.cut.answer
    assert marked(BYTES, document).endswith("assistant\n[T]")
    assert left_out(sample, size - len(STORY) - 4)
    # An instruction without a text after it is never cut.
    alone = Conversation([message("user", question), sample.messages[1]], instruction=question)
    assert left_out(alone, 600) and not left_out(alone._replace(instruction=None), 600)
    # The instruction belongs to the last user message of the line, not to that of an earlier answer.
    other = Conversation([message("user", STORY), sample.messages[1]], instruction=question)
    assert same(shorten(other, 600), shorten(other._replace(instruction=None), 600))


def test_the_longest_messages_of_a_turn_are_lowered_to_a_common_length() -> None:
    results = ["a" * 300, "b" * 200, "c" * 20]
    messages = [message("user", ASKED)]
    for number, result in enumerate(results):
        call = [{"name": "find", "arguments": {"page": number}}]
        messages += [message("assistant", "I look.", tool_calls=call), message("tool", result)]
    sample = Conversation([*messages, message("assistant", "It is a cat.")], TOOLS)
    chat = TemplateFormat(WITH_TOOLS, BYTES)
    size = len(whole(sample, chat).ids)
    for room, kept in ((519, [299, 200, 20]), (401, [191, 190, 20]), (41, [14, 14, 13])):
        document = shorten(sample, size - 520 + room, chat)
        expected = text_of(whole(sample, chat))
        for result, length in zip(results, kept):
            expected = expected.replace(result, result[:length])
        assert text_of(document) == expected
        assert document.targets.sum() == whole(sample, chat).targets.sum()
        assert document.cut == Cut(size, int(document.targets.sum()), inside=True)
    chat.close()


def test_a_system_message_is_cut_after_the_prompt_and_the_answer_last() -> None:
    """All limits from 2 tokens on: the text is written out."""
    system = "".join(chr(97 + number % 26) for number in range(50))
    sample = Conversation(
        [message("system", system), message("user", ASKED), *SUMMARY.messages[2:]]
    )
    before = whole(sample)
    least = len(before.ids) - len(system) - len("ok, then") - 1
    assert left_out(sample, 2) and left_out(sample, least) and not left_out(sample, least + 1)
    for limit in range(2, len(before.ids)):
        if limit <= least:
            assert left_out(sample, limit)
            continue
        document = shorten(sample, limit)
        assert len(document.ids) == limit
        kept, answer = max(limit - least - 9, 0), min(limit - least, 9)
        expected = marked(BYTES, before).replace(system, middle_cut(system, kept))
        expected = expected.replace("[ok, then<|im_end|>]", "[ok, then"[: 1 + answer] + "]")
        assert marked(BYTES, document) == (
            marked(BYTES, before).replace(system, middle_cut(system, kept))
            if answer == 9
            else expected
        )
        assert document.cut == Cut(len(before.ids), 9, inside=True, answer=answer < 9)


def test_the_earliest_calls_of_a_turn_go_before_its_answer_loses_its_end() -> None:
    """Messages of the assistant are never cut, so a long series of calls goes call by call."""
    messages = [message("user", ASKED)]
    for number in range(12):
        messages += [message("assistant", f"I look at page {number}."), message("tool", "x" * 50)]
    answer = message("assistant", "It is a cat.")
    sample = Conversation([*messages, answer], TOOLS)
    chat = TemplateFormat(WITH_TOOLS, BYTES)
    for steps in (11, 5, 1, 0):
        kept = [messages[0], *messages[len(messages) - 2 * steps :]]
        empty = [{**m, "content": ""} if m["role"] == "tool" else m for m in kept]
        least = whole(Conversation([*empty, answer], TOOLS), chat)
        document = shorten(sample, len(least.ids), chat)
        assert same(document, least) and document.cut.inside and not document.cut.answer
    document = shorten(sample, len(least.ids) - 1, chat)
    assert document.cut.answer and text_of(document).endswith("assistant It is a cat.")
    chat.close()


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Short. And all of it?", "Short. And all of it?"),
        (f"{STORY}. One? {ASKED}  ", f"One? {ASKED}  "),
        (f"{STORY}! “Two.” {ASKED}", f"“Two.” {ASKED}"),
        (f"{STORY}\n\n{ASKED}\nA) yes\nB) no\n", f"{ASKED}\nA) yes\nB) no\n"),
        ("话" * 300 + "。" + "为什么，" * 30, "为什么，" * 30),
        (f"{STORY}. Thanks!", f"{STORY}. Thanks!"[-192:]),  # a sentence of less than 100 characters
        (f"{STORY}. {'y' * 250}", "y" * 200),
    ],
)
def test_the_question_of_a_message_is_its_last_sentences(text: str, question: str) -> None:
    sample = PromptCompletion(text, "yes")
    size = len(question.encode())
    assert left_out(sample, size)
    assert text_of(shorten(sample, size + 1)) == question + "y"


# ------------------------------------------------------------------------------------------
# templates

MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ CONTENT + '<|im_end|>' }}{% endif %}
{%- endfor %}{{ '<|im_start|>assistant ' if add_generation_prompt }}"""
READS_SYSTEM = "{% if '/no_think' in messages[0].content %}{{ 'quick ' }}{% endif %}"
REFUSES_USER = "{% if 'word9 ' not in messages[1].content %}{{ raise_exception('no') }}{% endif %}"
SPELT = """{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "cut"),
    [
        (MARKED.replace("CONTENT", "m.content"), {"system", "user", "tool"}),
        (MARKED.replace("CONTENT", "m.content | trim"), {"system", "user", "tool"}),
        (MARKED.replace("CONTENT", "m.content | tojson"), {"system", "user", "tool"}),
        (SPELT, {"system", "user", "tool"}),  # the tool's result quotes the template
        (READS_SYSTEM + MARKED.replace("CONTENT", "m.content"), {"user", "tool"}),
        (REFUSES_USER + MARKED.replace("CONTENT", "m.content"), {"system", "tool"}),
        (MARKED.replace("CONTENT", "m.content + m.content"), set()),
        (MARKED.replace("CONTENT", "m.content | upper"), set()),
        (MARKED.replace("CONTENT", "m.content | replace('e', '3')"), {"user", "tool"}),
    ],
)
def test_only_what_a_template_prints_as_it_stands_is_cut(source: str, cut: set[str]) -> None:
    """Passages that a template reads, changes or repeats stay, and the question always stays."""
    chat = TemplateFormat(source, BYTES, answer_end="document")
    messages = [
        message("system", "  Be " + "so " * 90 + "nice, /no_think. "),
        message("user", f"  {STORY}\n{ASKED}  "),
        message("tool", 'tool: "ä" part0of1x\n' * 30),
        message("assistant", "yes"),
    ]
    shortest = {"system": "", "user": f"{ASKED}  ", "tool": ""}
    least = [{**m, "content": shortest[m["role"]]} if m["role"] in cut else m for m in messages]
    sample = Conversation(messages)
    expected = whole(Conversation(least), chat)
    answer = int(expected.targets.sum())
    assert same(shorten(sample, len(expected.ids), chat), expected)
    document = shorten(sample, len(expected.ids) - answer + 1, chat)
    assert document.ids.tolist() == expected.ids[: len(expected.ids) - answer + 1].tolist()
    assert left_out(sample, len(expected.ids) - answer, chat)
    chat.close()


def test_what_a_template_prints_after_the_answer_is_not_cut() -> None:
    source = "{% for m in messages[1:] %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}"
    source += "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    chat = TemplateFormat(source + "{{ messages[0].content }}", BYTES, answer_end="document")
    before = text_of(whole(SUMMARY, chat))
    document = shorten(SUMMARY, len(before) - 500 - len("<|endoftext|>") + 1, chat)
    passage = f"Summarise:\n{STORY}\n\n"
    assert text_of(document) == before.replace(passage, middle_cut(passage, len(passage) - 500))
    least = f"user: {ASKED}assistant: "
    assert text_of(shorten(SUMMARY, len(least) + 5, chat)) == least + "ok, t"
    chat.close()


@pytest.mark.parametrize("refused", ["< 9", "in (5, 7)"])
def test_where_the_template_refuses_shorter_conversations_no_turn_is_removed(refused: str) -> None:
    """Then tokens of all user messages but the last are cut, and no answer loses a token."""
    sample = talk(4)
    refusal = f"{{% if messages | length {refused} and not add_generation_prompt %}}"
    source = (
        refusal + "{{ raise_exception('no') }}{% endif %}" + MARKED.replace("CONTENT", "m.content")
    )
    chat = TemplateFormat(source, BYTES)
    before = whole(sample, chat)
    document = shorten(sample, len(before.ids) - 40, chat)
    assert document.targets.sum() == before.targets.sum()
    assert document.cut == Cut(len(before.ids), int(before.targets.sum()), inside=True)
    text = text_of(document)
    assert "Be brief." in text and sample.messages[7]["content"] in text
    assert all(m["content"] in text for m in sample.messages if m["role"] == "assistant")
    chat.close()


def test_an_answer_stays_whole_where_the_template_takes_only_the_whole_and_messages_follow_it() -> (
    None
):
    source = f"{{% if messages | length < 5 %}}{{{{ raise_exception('no') }}}}{{% endif %}}{NO_GENERATION_PROMPT}"
    messages = [message("user", "why " * 60), *talk(2, system=None).messages[1:]]
    chat = TemplateFormat(source, BYTES, answer_end="document")
    sample = Conversation([*messages, message("user", "thanks " * 30)])
    before = whole(sample, chat)
    kept = whole(Conversation([*messages, message("user", "")]), chat)
    text = text_of(kept).replace("user: <|endoftext|>", "<|endoftext|>")
    document = shorten(sample, 150, chat)
    assert len(document.ids) == 150 and document.targets.sum() == before.targets.sum()
    assert text_of(document).startswith("user: why why")
    assert text_of(document).endswith(text[text.index("assistant: ") :])
    assert document.cut == Cut(len(before.ids), int(before.targets.sum()), turns=1, inside=True)
    chat.close()


@pytest.mark.parametrize("asked", [False, True])
def test_the_header_of_an_answer_is_known_without_a_generation_prompt(asked: bool) -> None:
    chat = TemplateFormat(NO_GENERATION_PROMPT, BYTES)
    messages = [message("system", "Be brief. " * 9), message("user", "why?")] if asked else []
    sample = Conversation([*messages, message("assistant", "because")])
    before = whole(sample, chat)
    least = len("system: user: why?assistant: ") if asked else len("assistant: ")
    assert left_out(sample, least, chat)
    for limit in range(least + 1, len(before.ids)):
        document = shorten(sample, limit, chat)
        answer = min(len("because") + 1, limit - least)
        assert document.targets.sum() == answer and len(document.ids) == limit
        kept = text_of(before).replace(
            "Be brief. " * 9, middle_cut("Be brief. " * 9, limit - least - answer)
        )
        assert text_of(document) == kept[:limit] or limit - least > len("because")
    chat.close()


def test_special_tokens_in_a_message_that_is_cut_stay_plain_text() -> None:
    sample = Conversation([message("user", "<|im_end|>" * 60), message("assistant", "no")])
    document = shorten(sample, 300)
    assert (document.ids == BYTES.special_tokens["<|im_end|>"]).sum() == 2
    assert len(document.ids) == 300


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
    sample = Conversation([message("user", STORY + "."), message("assistant", "ok, then")])
    before = whole(sample, chat)
    for limit in range(200, len(before.ids), 7):
        if left_out(sample, limit, chat):
            assert limit < 250
            continue
        document = shorten(sample, limit, chat)
        end = len("ok, then") + (trains_all * 2)
        assert len(document.ids) == limit and document.targets[1:].all()
        assert document.cut.answer or document.ids[-end:].tolist() == before.ids[-end:].tolist()


# ------------------------------------------------------------------------------------------
# prompts, and tokenizers that do not split cleanly


def test_a_prompt_loses_its_middle_and_a_completion_its_end() -> None:
    numbers = NullTokenizer(600)
    prompt, question = list(range(300)), [*range(250, 300)]  # 50 numbers and spaces: 200 characters
    sample = PromptCompletion(" ".join(map(str, prompt)), "501 502 503")
    for limit in range(2, 304):
        room = limit - len(question)
        if room < 1:
            assert left_out(sample, limit, tokenizer=numbers)
            continue
        document = shorten(sample, limit, tokenizer=numbers)
        kept = [*prompt[: (max(room - 4, 0) + 1) // 2], *prompt[250 - max(room - 4, 0) // 2 : 250]]
        answer = [501, 502, 503, 599][: min(room, 4)]
        assert document.ids.tolist() == [*kept, *question, *answer]
        assert document.targets.tolist() == [int(token > 500) for token in document.ids]
        assert document.cut == Cut(304, 4, inside=True, answer=room < 4, question=True)
    document = shorten(PromptCompletion("", "11 12 13 14"), 3, tokenizer=numbers)
    assert (document.ids.tolist(), document.targets.tolist()) == ([11, 12, 13], [0, 1, 1])


def test_a_prefix_stays_and_a_tokenizer_that_does_not_split_is_cut_by_tokens(tmp_path) -> None:
    from tokenizers import processors

    engine = byte_level(["<s>", "</s>"])
    engine.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = save_tokenizer(tmp_path / "split", engine, eos_token="</s>", bos_token="<s>")
    unsplit = save_tokenizer(tmp_path / "whole", metaspace(), eos_token="</s>")
    assert not unsplit.splits_cleanly
    sample = PromptCompletion(
        "Hello there. " + "how are you today " * 40 + ". am I fine?", " I am fine."
    )
    for each, first in ((tokenizer, "<s>Hello there."), (unsplit, "Hello there.")):
        before = whole(sample, tokenizer=each)
        for limit in (90, 120, len(before.ids) - 1):
            document = shorten(sample, limit, tokenizer=each)
            text = each.decode(document.ids)
            assert len(document.ids) == limit
            assert text.startswith(first) and text.endswith(" am I fine? I am fine.</s>")
            assert document.targets.sum() == before.targets.sum()


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
    content = "Hello there, " + "how are you " * 40 + ". am I fine?"
    long = Conversation([message("system", "the user"), message("user", content), turns[1]])
    before = whole(long, chat, tokenizer)
    for limit in range(100, len(before.ids), 9):
        document = shorten(long, limit, chat, tokenizer)
        text = tokenizer.decode(document.ids)
        assert len(document.ids) == limit
        assert text.startswith("the user<s>[INST] Hello")
        assert text.endswith(" am I fine? [/INST] I am fine </s>")
        assert document.targets.sum() == before.targets.sum()
    chat.close()


def test_a_token_of_markup_and_message_stays(tmp_path) -> None:
    """A tokenizer that does not split may make one token of the template's text and a message."""
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ 'Hel' + m.content + bos_token }}"
    source += "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    tokenizer = save_tokenizer(tmp_path, metaspace(), eos_token="</s>", bos_token="<s>")
    chat = TemplateFormat(source, tokenizer)
    sample = Conversation([message("user", "lo " * 200), message("assistant", "yes")])
    least = next(n for n in range(2, 400) if not left_out(sample, n, chat, tokenizer))
    assert tokenizer.decode(shorten(sample, least, chat, tokenizer).ids).startswith("Hello lo")
    chat.close()


def test_the_question_of_a_prompt_stays_where_the_tokenizer_changes_its_letters(tmp_path) -> None:
    """The decoded question is not the text of the line."""
    engine = byte_level(["</s>"])
    engine.normalizer = normalizers.Lowercase()
    tokenizer = save_tokenizer(tmp_path, engine, eos_token="</s>")
    sample = PromptCompletion("How Are You Today. " * 60 + "\nWhich Assistant?", " I am fine.")
    document = shorten(sample, 170, tokenizer=tokenizer)
    assert tokenizer.decode(document.ids).endswith("\nwhich assistant? i am fine.</s>")
    assert len(document.ids) == 170 and document.cut.question and not document.cut.answer


def test_documents_of_given_tokens_stay_as_they_are() -> None:
    sample = TokenSequence(list(range(100)), [0] * 90 + [1] * 10)
    document = whole(sample)
    encoder = ShorteningEncoder(tokenizer=BYTES, chat=CHATML, max_tokens=50)
    [line] = encoder.encode([[sample]])
    assert same(line.documents[0], document) and line.documents[0].cut is None


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


def test_stories_of_lines_with_an_instruction_keep_their_questions(tmp_path) -> None:
    """Instructions stand before the stories, which are several times too long."""
    questions = [f"What happens to person {number}, and why?" for number in range(50)]
    lines = [
        json.dumps(
            {"instruction": question, "input": STORY * (4 + number % 3), "output": "It wins."}
        )
        for number, question in enumerate(questions)
    ]
    dataset = open_lines(tmp_path, lines, shorten_to=2048)
    assert dataset.lengths.tolist() == [2048] * 50
    for number, question in enumerate(questions):
        tokens, targets = dataset.document(number)
        text = BYTES.decode(tokens)
        assert f"user\n{question}\n\nword0 word1 " in text and "word198 word199<|im_end|>" in text
        assert BYTES.decode(tokens[targets == 1]) == "It wins.<|im_end|>"
    assert dataset.report.cut_questions == 50
    [_, _, shortened, *lost] = dataset.sentences()
    assert shortened.startswith("50 of them were shortened so that they keep their last answer: ")
    assert shortened.endswith(" tokens (0 targets) were removed") and lost == [
        "  50 of these lost tokens inside their last turn or their prompt",
        "  50 of these lost the middle of their last user message or prompt",
    ]


def test_documents_whose_question_is_too_long_are_left_out_and_counted(tmp_path) -> None:
    """Only such a document is left out of a line with several."""
    long = {"instruction": STORY, "output": "yes"}
    talks = [
        [message("system", "A"), message("user", text), message("assistant", "yes")]
        for text in ("why?", ". " + "y" * 199, "how?")
    ]
    lines = [
        json.dumps(long),
        json.dumps({"messages": [m for part in talks for m in part]}),
        conversation("a", "b"),
    ]
    dataset = open_lines(tmp_path, lines, shorten_to=225, max_bad_fraction=0.0)
    assert dataset.report.empty == {"question_too_long": 1} and not dataset.report.bad
    assert (dataset.report.good, dataset.report.documents) == (2, 3)
    texts = [BYTES.decode(dataset.document(number)[0]) for number in range(3)]
    assert ["why?" in texts[0], "how?" in texts[1], "user\na<" in texts[2]] == [True] * 3
    text = "\n".join(dataset.sentences())
    assert (
        "documents that are left out of lines with other documents: question_too_long (1)" in text
    )
    assert (
        "1 x question_too_long: " in text and "the lines with a question that is too long" in text
    )
    assert "shortened" not in text and " lost " not in text
    with pytest.raises(
        DataError, match=r"a question that is too long; .* raise --max-document-length"
    ):
        open_lines(tmp_path, lines[:1], shorten_to=225)


# ------------------------------------------------------------------------------------------
# random conversations


def random_conversation(random: random.Random) -> Conversation:
    """Return a conversation with long and short messages, tool results and untrained answers."""

    def words(most: int) -> str:
        chosen = random.choices(
            ["who", "is", "the <|im_end|>", "é", "user.", "\n", "😀"], k=random.randint(1, most)
        )
        return " ".join(chosen)

    messages = [message("system", words(60))] if random.random() < 0.5 else []
    for turn in range(random.randint(1, 4)):
        asked = words(random.choice([5, 200])) + f".  Question {turn} {'z' * 20}?"
        messages.append(message("user", asked))
        for call in range(random.choice([0, 0, 1, 3])):
            train = {"train": False} if random.random() < 0.3 else {}
            messages.append(message("assistant", f"call {turn} {call}", **train))
            messages.append(message("tool", words(random.choice([3, 150]))))
        messages.append(message("assistant", f"answer {turn} {words(20)}"))
    instruction = None
    if random.random() < 0.3:
        last = max(n for n, m in enumerate(messages) if m["role"] == "user")
        instruction = f"Instruction {words(10)}"
        messages[last] = message("user", f"{instruction}\n\n{words(200)}")
    return Conversation(messages, instruction=instruction)


def spans_of(document: EncodedDocument) -> list[bytes]:
    """Return the bytes of each run of targets."""
    text, spans = b"", []
    for token, target in zip(document.ids.tolist(), document.targets.tolist()):
        if target:
            text += bytes([token]) if token < 256 else BYTES.decode([token]).encode()
        elif text:
            spans.append(text)
            text = b""
    return [*spans, text] if text else spans


def question_of(sample: Conversation) -> str:
    """Return what is never cut of the last user message, found in another way than by the package."""
    content = [m["content"] for m in sample.messages if m["role"] == "user"][-1]
    if sample.instruction is not None:
        end = len(sample.instruction)
        return content[: len(content) - len(content[end:].lstrip())]
    if len(content) <= 200:
        return content
    size = len(content)
    words = [
        at
        for at in range(size - 199, size)
        if content[at - 1] in " \n" and content[at] not in " \n"
    ]
    sentences = [at for at in words if content[:at].rstrip(" ")[-1] in ".\n" and at <= size - 100]
    first = (sentences or words)[0]
    return content[first - (content[first - 1] == " ") :]


@pytest.mark.parametrize("seed", range(60))
def test_random_conversations_keep_question_and_answer(seed: int) -> None:
    rng = random.Random(seed)
    sample = random_conversation(rng)
    before, question = whole(sample), question_of(sample)
    learned = spans_of(before)
    head = [message("system", "")] if sample.messages[0]["role"] == "system" else []
    asked = Conversation([*head, message("user", question), message("assistant", "")])
    least = len(whole(asked).ids) - 1
    for limit in sorted({2, least, least + 1, *rng.sample(range(2, len(before.ids) + 9), 12)}):
        assert left_out(sample, limit) == (limit <= least), (limit, least)
        if limit <= least:
            continue
        document = shorten(sample, limit)
        if limit >= len(before.ids):
            assert same(document, before) and document.cut is None
            continue
        assert f"<|im_start|>user\n{question}" in text_of(document) or (
            sample.instruction is None and f"{question}<|im_end|>\n" in text_of(document)
        )
        assert document.cut[:2] == (len(before.ids), before.targets.sum())
        later = iter(before.ids.tolist())
        assert all(token in later for token in document.ids.tolist())  # no token is new or moved
        spans = spans_of(document)
        if document.cut.answer:
            assert learned[-1].startswith(spans[-1]) and spans[-1] != learned[-1]
            assert len(document.ids) == limit
            spans = spans[:-1]
        else:
            assert spans[-1] == learned[-1]
        assert [span for span in learned if span in spans] == spans


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.name)
def test_templates_of_models_keep_question_and_answer(structure: Structure, tmp_path) -> None:
    """Templates that print tools, thoughts, and earlier turns in another way than the last one."""
    write_tokenizer(structure, tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    chat = chat_format(tokenizer, date=DATE, unprinted_policy="count")
    rng = random.Random(structure.name)
    shortened = 0
    for line in conversations(structure)[:12]:
        for m in line["messages"]:
            if m["role"] in ("user", "tool") and rng.random() < 0.6:
                m["content"] = f"First. {'snow and rain ' * rng.randint(0, 99)}. {m['content']}"
        try:
            [talk, *_] = samples_of(line)
            last = max(n for n, m in enumerate(talk.messages) if m["role"] == "assistant")
            for number, m in enumerate(talk.messages[: last + 1]):
                if m["role"] == "assistant":  # one answer makes one document
                    m["train"] = number == last
            talk = talk._replace(messages=talk.messages[: last + 1])
            before = whole(talk, chat, tokenizer)
        except (BadLine, AssertionError):  # some templates refuse some conversations
            continue
        text, targets = tokenizer.decode(before.ids), before.targets
        asked = max((n for n, m in enumerate(talk.messages[:-1]) if m["role"] == "user"), default=0)
        question = talk.messages[asked]["content"].strip()[-100:].strip()
        for limit in (300, 2 * len(before.ids) // 3, len(before.ids) - 1):
            encoder = ShorteningEncoder(tokenizer=tokenizer, chat=chat, max_tokens=limit)
            [outcome] = encoder.encode([[talk]])
            if isinstance(outcome, BadLine):
                assert outcome.reason == "question_too_long"
                continue
            [document] = outcome.documents
            assert len(document.ids) <= limit and document.targets.any()
            if document.cut is None:
                continue
            shortened += 1
            if question in text:
                assert question in tokenizer.decode(document.ids)
            if not document.cut.answer:
                run = int(targets[::-1].argmin())
                assert document.ids[-run:].tolist() == before.ids[-run:].tolist()
                assert document.targets[-run:].all()
    assert shortened > 5
    chat.close()
    tokenizer.close()


def test_the_limit_decides_the_cache_only_where_documents_are_shortened(
    tmp_path, monkeypatch
) -> None:
    lines = [conversation(STORY, "a" * 300)]

    def opened() -> list[TokenizedDataset]:
        return [open_lines(tmp_path, lines, shorten_to=limit) for limit in (None, 3000, 600)]

    plain, longer, shorter = opened()
    assert [*plain.manifest["arrays"]] == ["tokens", "targets", "offsets", "target_counts"]
    assert len({plain.key, longer.key, shorter.key}) == 3
    assert (
        plain.content_hash == longer.content_hash != shorter.content_hash
    )  # a limit above all documents changes no content
    monkeypatch.setattr(tokenized_dataset, "_SHORTENING", "another version")
    again = opened()
    assert again[0].key == plain.key and not {longer.key, shorter.key} & {d.key for d in again}
