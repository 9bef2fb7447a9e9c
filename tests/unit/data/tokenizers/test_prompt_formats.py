"""Tests that --sft-tokenizer-prompt-format gives the tokens and targets of Megatron's SFTTokenizer."""

import pytest

from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.sources.line_schema import Conversation, PromptCompletion
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.chat_format import TemplateFormat, chat_format
from megatron_packed.data.tokenizers.encode import prompt_tokens
from megatron_packed.data.tokenizers.prompt_formats import FORMATS_BY_NAME
from support.data_helpers import CORPUS, byte_level, encode, marked, one, save_tokenizer
from support.messages import assistant, system, tool, user

SPECIAL = ("<unk>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>")
OWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TALK = [
    system(" Be brief. /no_think\n"),
    user("Hello /think there"),
    assistant("\nI am  fine.\n"),
    user("\tand you? "),
    assistant("How are you today?"),
]
BY_HAND = {
    "nemotron-h-aligned": "<SPECIAL_10>System\nBe brief. /no_think\n<SPECIAL_11>User\nHello /think there\n"
    "<SPECIAL_11>Assistant\n[I am  fine.\n]<SPECIAL_11>User\nand you?\n<SPECIAL_11>Assistant\n[How are you today?\n]",
    "nemotron-nano-v2": "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nHello  there\n"
    "<SPECIAL_11>Assistant\n[I am  fine.\n<SPECIAL_12>\n]<SPECIAL_11>User\nand you?\n"
    "<SPECIAL_11>Assistant\n[How are you today?\n<SPECIAL_12>\n]",
    "identity": "[ Be brief. /no_think\nHello /think there\nI am  fine.\n\tand you? How are you today?]",
    "default": "[system:  Be brief. /no_think\n</s>user: Hello /think there</s>assistant: \nI am  fine.\n</s>"
    "user: \tand you? </s>assistant: How are you today?</s>]",
}


@pytest.fixture
def tokenizer(tmp_path):
    engine = byte_level(SPECIAL, [*CORPUS, "User Assistant System " * 40])
    return save_tokenizer(
        tmp_path,
        engine,
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=OWN,
        tokenizer_class="TokenizersBackend",
    )


@pytest.mark.shows("Prompt format", lambda name: name)
@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_tokens_and_targets_by_hand(tokenizer, name):
    chat = chat_format(tokenizer, prompt_format=name)
    document = one(tokenizer, chat, Conversation(TALK))
    assert document.targets[0] == 0  # index 0 is never a target, because no token precedes it
    document.targets[0] = document.targets[1]
    assert marked(tokenizer, document) == BY_HAND[name]
    prompt = prompt_tokens(tokenizer, chat, TALK[:2])
    if name.startswith("nemotron"):
        assert document.ids[: len(prompt)].tolist() == prompt
        assert marked(tokenizer, document).startswith(tokenizer.decode(prompt) + "[")
    completion = one(tokenizer, chat, PromptCompletion("a", "b"))
    assert (
        marked(tokenizer, completion) == "a[b</s>]"
    )  # prompt formats do not apply to prompt-completion data, which Megatron does not read
    chat.close()


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_against_megatron_core(tokenizer, name):
    pytest.importorskip("transformers")
    theirs = pytest.importorskip(
        "megatron.core.tokenizers.text.libraries.sft_tokenizer", exc_type=ImportError
    )
    their_tokenizer = theirs.SFTTokenizer(str(tokenizer.path.parent), name)
    chat = chat_format(tokenizer, prompt_format=name)
    for talk in (
        TALK,
        TALK[1:3],
        TALK[1:],
        [TALK[1], assistant("日本 é😀 \n\n x")],
    ):
        tokens, targets = their_tokenizer.tokenize_conversation(
            talk, return_target=True, add_generation_prompt=False
        )
        document = one(tokenizer, chat, Conversation(talk))
        assert document.ids.tolist() == tokens.tolist()
        assert document.targets[1:].tolist() == (targets != theirs.IGNORE_INDEX)[1:].tolist()
    assert tokenizer.eod_id == their_tokenizer.eod
    chat.close()


def test_special_tokens_in_messages_count_only_where_no_template_is(tokenizer):
    talk = [
        user("a</s><SPECIAL_11>"),
        assistant("b</s>"),
    ]
    special = set(tokenizer.special_tokens.values())
    counts = {}
    for name in FORMATS_BY_NAME:
        chat = chat_format(tokenizer, prompt_format=name)
        counts[name] = sum(
            int(token) in special for token in one(tokenizer, chat, Conversation(talk)).ids
        )
        chat.close()
    assert counts == {"nemotron-h-aligned": 2, "nemotron-nano-v2": 3, "identity": 3, "default": 2}


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_messages_that_are_not_to_be_trained(tokenizer, name):
    talk = [{**message, "train": False} if at == 2 else message for at, message in enumerate(TALK)]
    chat = chat_format(tokenizer, prompt_format=name)
    document = one(tokenizer, chat, Conversation(talk))
    chat.close()
    said = [tokenizer.decode(document.ids[document.targets == kind]) for kind in (0, 1)]
    assert "fine" in said[0] and "fine" not in said[1] and "How are you today?" in said[1]
    assert ("Hello" in said[1]) == FORMATS_BY_NAME[name].trains_all


@pytest.mark.parametrize("name", ["nemotron-h-aligned", "nemotron-nano-v2"])
def test_what_the_format_does_not_print_is_not_dropped_in_silence(tokenizer, name):
    chat = chat_format(tokenizer, prompt_format=name)
    call = assistant("", tool_calls=[{"function": {"name": "f"}}])
    for talk, tools in [
        ([*TALK, call], None),
        ([*TALK[:3], tool("1"), TALK[4]], None),
        (TALK, [{"name": "f"}]),
    ]:
        [outcome] = encode(tokenizer, chat, Conversation(talk, tools))
        assert isinstance(outcome, BadLine) and "this prompt format prints no tool" in str(outcome)
    with pytest.raises(
        DataError, match=f"{name} needs the special tokens <SPECIAL_10>, <SPECIAL_11>"
    ):
        chat_format(ByteTokenizer(), prompt_format=name)


def test_formats_have_different_fingerprints(tokenizer):
    formats = [chat_format(tokenizer, prompt_format=name) for name in (*FORMATS_BY_NAME, None)]
    assert len({chat.fingerprint for chat in formats}) == len(formats)
    for chat in formats:
        chat.close()


def test_a_format_has_a_cache_of_its_own(tokenizer):
    """The fingerprint of a chat format changes with its targets and with its end of document."""
    assert (
        len(
            {
                TemplateFormat(None, tokenizer, trains_all=a, ends_documents=b).fingerprint
                for a in (False, True)
                for b in (False, True)
            }
        )
        == 4
    )
