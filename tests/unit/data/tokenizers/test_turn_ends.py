"""Tests of the ends of answers, token by token, for templates in the forms of common families."""

import pytest
from tokenizers import AddedToken

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.line_schema import Conversation, PromptCompletion
from megatron_packed.data.tokenizers import chat_format as formats
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.chat_format import chat_format
from megatron_packed.data.tokenizers.chat_template import Rendered
from megatron_packed.data.tokenizers.encode import answer_ends
from megatron_packed.data.tokenizers.prompt_formats import FORMATS_BY_NAME
from megatron_packed.data.tokenizers.turn_markers import TurnCutter, TurnEnd
from support.data_helpers import byte_level, encode, marked, metaspace, one, save_tokenizer
from support.messages import message

GENERATED = "{{% generation %}}{}{{% endgeneration %}}"


def turns(user: str, assistant: str, prompt: str, after: str = "") -> str:
    """Return a template that prints ``user`` and ``assistant`` for the messages of the two roles."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{assistant}{{% else %}}{user}{{% endif %}}{{% endfor %}}"
        f"{{{{ '{prompt}' if add_generation_prompt }}}}{after}"
    )


FINAL = "{{ '' if add_generation_prompt else eos_token }}"
CHATML_USER = "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
CHATML_HEAD, CHATML_PROMPT = "{{ '<|im_start|>assistant\n' }}", "<|im_start|>assistant\n"
CHATML_TALK = (
    "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[a<|im_end|>]\n"
    "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
)
"""The two turns of the test in ChatML, up to the second answer."""
FAMILIES = {
    # ChatML of a tokenizer without {% generation %}, as Qwen: the end of the document is <|im_end|>
    "Qwen": (
        turns(CHATML_USER, CHATML_HEAD + "{{ m.content + '<|im_end|>\n' }}", CHATML_PROMPT),
        "<|im_end|>",
        CHATML_TALK + "[b<|im_end|>]",
        {"<|im_end|>"},
    ),
    # the block contains the line end after the end of the turn
    "line end in the block": (
        turns(
            CHATML_USER,
            CHATML_HEAD + GENERATED.format("{{ m.content + '<|im_end|>\n' }}"),
            CHATML_PROMPT,
        ),
        "</s>",
        CHATML_TALK + "[b<|im_end|>]",
        {"<|im_end|>", "</s>"},
    ),
    # the block leaves the end of the turn out
    "text in the block": (
        turns(
            CHATML_USER,
            CHATML_HEAD + GENERATED.format("{{ m.content }}") + "{{ '<|im_end|>\n' }}",
            CHATML_PROMPT,
        ),
        "</s>",
        CHATML_TALK + "[b<|im_end|>]",
        {"<|im_end|>", "</s>"},
    ),
    # an end of the document follows the last message
    "Phi": (
        turns(
            "{{ '<|user|>\n' + m.content + '<|end|>\n<|assistant|>\n' }}",
            "{{ m.content + '<|end|>\n' }}",
            "",
            FINAL,
        ),
        "</s>",
        "<|user|>\nq<|end|>\n<|assistant|>\n[a<|end|>]\n<|user|>\nr<|end|>\n<|assistant|>\n[b<|end|>]",
        {"<|end|>", "</s>"},
    ),
    "Llama 2": (
        turns(
            "{{ bos_token + '<|inst|> ' + m.content + ' <|/inst|>' }}",
            "{{ ' ' + m.content + ' ' + eos_token }}",
            "",
        ),
        "</s>",
        "<s><|inst|> q <|/inst|>[ a </s>]<s><|inst|> r <|/inst|>[ b </s>]",
        {"</s>"},
    ),
    "Llama 3": (
        turns(
            "{{ '<|head|>user<|/head|>\n\n' + m.content | trim + '<|eot|>' }}",
            "{{ '<|head|>assistant<|/head|>\n\n' + m.content | trim + '<|eot|>' }}",
            "<|head|>assistant<|/head|>\n\n",
        ),
        "</s>",
        "<|head|>user<|/head|>\n\nq<|eot|><|head|>assistant<|/head|>\n\n[a<|eot|>]"
        "<|head|>user<|/head|>\n\nr<|eot|><|head|>assistant<|/head|>\n\n[b<|eot|>]",
        {"<|eot|>", "</s>"},
    ),
    "Mistral": (
        turns("{{ '<|inst|>' + m.content + '<|/inst|>' }}", "{{ m.content + eos_token }}", ""),
        "</s>",
        "<|inst|>q<|/inst|>[a</s>]<|inst|>r<|/inst|>[b</s>]",
        {"</s>"},
    ),
    # a Gemma whose documents end with another token than its turns, and which refuses system messages
    "Gemma": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        + turns(
            "{{ '<|turn|>user\n' + m.content | trim + '<|end|>\n' }}",
            "{{ '<|turn|>model\n' + m.content | trim + '<|end|>\n' }}",
            "<|turn|>model\n",
        ),
        "</s>",
        "<|turn|>user\nq<|end|>\n<|turn|>model\n[a<|end|>]\n<|turn|>user\nr<|end|>\n<|turn|>model\n[b<|end|>]",
        {"<|end|>", "</s>"},
    ),
    # two special tokens end an answer; the last one ends the turn
    "Cohere": (
        turns(
            "{{ '<|user|>' + m.content + '<|eot|>' }}",
            "{{ '<|assistant|>' + m.content + '<|end|><|eot|>' }}",
            "<|assistant|>",
        ),
        "</s>",
        "<|user|>q<|eot|><|assistant|>[a<|end|><|eot|>]<|user|>r<|eot|><|assistant|>[b<|end|><|eot|>]",
        {"<|eot|>", "</s>"},
    ),
    # a special token begins the next turn, and none ends an answer
    "Nemotron": (
        turns(
            "{{ '<|user|>User\n' + m.content + '\n' }}",
            "{{ '<|user|>Assistant\n' + m.content + '\n' }}",
            "<|user|>Assistant\n",
        ),
        "</s>",
        "<|user|>User\nq\n<|user|>Assistant\n[a\n]<|user|>User\nr\n<|user|>Assistant\n[b\n</s>]",
        {"</s>"},
    ),
    # the end of a turn is ordinary text
    "plain text": (
        turns(
            "{{ 'Q: ' + m.content + '\n' }}",
            "{{ 'A: ' }}" + GENERATED.format("{{ m.content }}") + "{{ ' END\n' }}",
            "A: ",
        ),
        "</s>",
        "Q: q\nA: [a] END\nQ: r\nA: [b</s>]",
        {"</s>"},
    ),
    # only the last answer of a conversation has an end
    "end of the document": (
        turns("{{ 'Q: ' + m.content }}", "{{ ' A: ' + m.content }}", " A: ", FINAL),
        "</s>",
        # A document each: after "A: ", the served history has a token that begins with a space.
        "Q: q A: [a</s>] Q: q A: aQ: r A: [b</s>]",
        {"</s>"},
    ),
}  # fmt: skip
SPECIAL = ("</s>", "<s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>")
SPECIAL += ("<|turn|>", "<|eot|>", "<|head|>", "<|/head|>", "<|inst|>", "<|/inst|>")


TALK = [
    message("user", "q"),
    message("assistant", "a"),
    message("user", "r"),
    message("assistant", "b"),
]


@pytest.fixture(autouse=True)
def _renders_in_this_process(monkeypatch):
    """Render all templates in this process, which saves the start of a child for each of them."""

    class Everything:
        def __contains__(self, template):
            return True

    monkeypatch.setattr(formats, "OWN_TEMPLATES", Everything())


@pytest.fixture(scope="module")
def engine():
    return byte_level(SPECIAL)


def tokenizer_of(folder, engine, end, template=None):
    return save_tokenizer(
        folder,
        engine,
        eos_token=end,
        bos_token="<s>",
        **{"chat_template": template} if template else {},
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_once(family, tmp_path, engine):
    """Each answer is learned with the end of its turn, and the document ends with the last answer.

    Generation stops at the same token.
    """
    template, end, expected, stops = FAMILIES[family]
    tokenizer = tokenizer_of(tmp_path, engine, end, template)
    chat = chat_format(tokenizer)
    longer = [*TALK, message("user", "bye"), message("assistant", "unused", train=False)]
    for messages in (TALK, [*TALK, message("user", "bye")], longer):
        [documents] = encode(tokenizer, chat, Conversation(messages))
        assert " ".join(marked(tokenizer, document) for document in documents) == expected
    assert answer_ends(tokenizer, chat) == {tokenizer.special_tokens[stop] for stop in stops}
    assert answer_ends(tokenizer) == {tokenizer.eod_id}
    warned = [line for line in chat.sentences() if "leave out <|im_end|>" in line]
    assert bool(warned) == (family == "text in the block")


def test_tokenizers_without_a_template_use_chatml():
    """The end of a turn of the built-in template is learned once, and no token after the last one."""
    bytes_ = ByteTokenizer()
    assert marked(bytes_, one(bytes_, chat_format(bytes_), Conversation(TALK))) == (
        CHATML_TALK + "[b<|im_end|>]"
    )
    document = one(bytes_, chat_format(bytes_), PromptCompletion("q", "a"))
    assert marked(bytes_, document) == "q[a<|endoftext|>]"


@pytest.mark.parametrize(("end", "after"), [("</s>", "\n[</s>]"), ("<|im_end|>", "\n[<|im_end|>]")])
def test_answer_end_document_gives_the_targets_of_earlier_versions(end, after, tmp_path, engine):
    """The option appends the end-of-document token, and the fingerprints of the caches differ."""
    tokenizer = tokenizer_of(tmp_path, engine, end)
    chat = chat_format(tokenizer, answer_end="document")
    document = one(tokenizer, chat, Conversation(TALK))
    assert marked(tokenizer, document) == CHATML_TALK + "[b<|im_end|>]" + after
    assert answer_ends(tokenizer, chat) == answer_ends(tokenizer, chat_format(tokenizer))
    prints = chat.fingerprint, chat_format(tokenizer).fingerprint
    assert [name.partition(":")[0] for name in prints] == ["template-1", "template-2"]


def test_other_ends_than_that_of_a_plain_answer(tmp_path, engine):
    """A call of a tool ends with its own special tokens, and a user cannot end a turn.

    A block that leaves out the end of a turn gets the end after a special token, too.
    """
    user, head = "{{ '<|user|>' + m.content }}", "{{ '<|assistant|>' }}"
    called = "{{ '<|turn|>' if m.tool_calls }}"
    own_end = head + "{{ m.content }}" + called + "{{ '<|eot|>' if m.tool_calls else '<|end|>' }}"
    block = head + GENERATED.format("{{ m.content }}" + called) + "{{ '<|end|>\n' }}"
    call = message("assistant", "c", tool_calls=[{"function": {"name": "f"}}])
    forged = message("assistant", "x<|end|>")
    begin = "<|user|>q<|assistant|>"
    for assistant, answer, expected in (
        (own_end, call, f"{begin}[c<|turn|><|eot|>]"),
        (own_end, forged, f"{begin}[x<|end|><|end|>]"),
        (block, call, f"{begin}[c<|turn|><|end|>]"),
        (block, forged, f"{begin}[x<|end|><|end|>]"),
    ):
        template = turns(user, assistant, "<|assistant|>")
        tokenizer = tokenizer_of(tmp_path, engine, "</s>", template)
        chat = chat_format(tokenizer)
        document = one(tokenizer, chat, Conversation([TALK[0], answer]))
        assert marked(tokenizer, document) == expected
        assert answer_ends(tokenizer, chat) == {tokenizer.special_tokens["<|end|>"], 0}
        ends = document.ids == tokenizer.special_tokens["<|end|>"]
        assert ends.sum() == (assistant is block or answer is forged)


def test_a_special_token_that_includes_white_space_next_to_it(tmp_path):
    """The end of a turn of Phi-3 includes the line end after it; both are one target."""
    engine = metaspace()
    engine.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    answer = GENERATED.format("{{ ' ' + m.content + '<|end|>' }}")
    template = turns(
        "{{ 'Q ' + m.content + '<|end|>\n' }}", "{{ 'A' }}" + answer + "{{ '\n' }}", "A"
    )
    tokenizer = tokenizer_of(tmp_path, engine, "</s>", template)
    assert not tokenizer.splits_cleanly
    chat = chat_format(tokenizer)
    document = one(tokenizer, chat, Conversation(TALK))
    end = tokenizer.special_tokens["<|end|>"]
    assert (document.ids == end).sum() == 4 and document.ids[-1] == end
    assert document.targets[document.ids == end].tolist() == [0, 1, 0, 1]
    trained = tokenizer.decode(document.ids[document.targets == 1])
    assert trained.replace(" ", "") == "a<|end|>b<|end|>"


def test_answers_that_are_printed_otherwise_later_have_documents_of_their_own(tmp_path, engine):
    """Only special tokens and white space at the end of a conversation may be missing later."""
    rewritten = "{{ m.content + ('!</s>' if loop.last else '?') }}"
    template = turns("{{ '<|user|>' + m.content }}", rewritten, "")
    tokenizer = tokenizer_of(tmp_path, engine, "</s>", template)
    chat = chat_format(tokenizer)
    one_turn, two_turns = encode(tokenizer, chat, Conversation(TALK[:2]), Conversation(TALK))
    assert marked(tokenizer, one_turn[0]) == "<|user|>q[a!</s>]"
    assert [marked(tokenizer, document) for document in two_turns] == [
        "<|user|>q[a!</s>]",
        "<|user|>qa?<|user|>r[b!</s>]",
    ]


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_megatrons_formats_stop_at_their_own_end(name, tmp_path):
    """nemotron-nano-v2 ends answers with <SPECIAL_12>; nemotron-h-aligned has no end of a turn."""
    tokenizer = tokenizer_of(
        tmp_path, byte_level(("</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")), "</s>"
    )
    chat = chat_format(tokenizer, prompt_format=name)
    more = {3} if name == "nemotron-nano-v2" else set()
    assert answer_ends(tokenizer, chat) == {0} | more
    assert chat.ends_documents and not chat.ends_turns


def test_a_range_that_repeats_the_end_of_the_turn_ends_at_the_first_one() -> None:
    """A range of a template may hold the end of the turn twice; only the first end is learned."""
    cutter = TurnCutter(TurnEnd("<end>", "<end>"), ["<end>"])
    text = "question answer<end>\n<end>\n"
    assert cutter.cut(text, [(9, len(text))]) == Rendered("question answer<end>", [(9, 20)])


@pytest.mark.parametrize(("prompt", "said_so"), [("<|user|>", True), ("<|assistant|>", False)])
def test_blocks_after_another_prompt_than_the_served_one_are_reported(
    prompt, said_so, tmp_path, engine
):
    source = turns(
        "{{ '<|user|>' + m.content }}",
        "{{ '<|assistant|>' }}" + GENERATED.format("{{ m.content + '</s>' }}"),
        prompt,
    )
    chat = chat_format(tokenizer_of(tmp_path, engine, "</s>", source))
    found = [line for line in chat.sentences() if "differs from the prompt" in line]
    assert len(found) == said_so


def test_a_template_that_asks_for_a_date_is_reported_until_it_gets_one(tmp_path, engine):
    source = "{{ strftime_now('%Y') if strftime_now is defined }}" + FAMILIES["Qwen"][0]
    tokenizer = tokenizer_of(tmp_path, engine, "<|im_end|>", source)
    for date, count in ((None, 1), ("2026-11-28", 0)):
        chat = chat_format(tokenizer, date=date)
        assert len([line for line in chat.sentences() if "--chat-template-date" in line]) == count
        text = one(tokenizer, chat, Conversation(TALK[:2])).ids
        assert tokenizer.decode(text).startswith("2026" if date else "<|im_start|>")


def test_a_tokenizer_without_template_and_without_chatml_is_refused_for_conversations(
    tmp_path, engine
):
    """Prompts and completions need no template, and chatml can be demanded."""
    tokenizer = save_tokenizer(tmp_path, byte_level(["</s>"]), eos_token="</s>")
    with pytest.raises(DataError, match=r"<\|im_start\|> and <\|im_end\|> of ChatML are no tokens"):
        encode(tokenizer, chat_format(tokenizer), Conversation(TALK))
    assert one(tokenizer, chat_format(tokenizer), PromptCompletion("q", "a"))
    assert one(tokenizer, chat_format(tokenizer, "chatml"), Conversation(TALK))


def test_conversations_with_tools_use_the_template_for_tools(tmp_path, engine):
    named = [
        {"name": "tool_use", "template": "{{ 'T' if tools }}" + FAMILIES["Qwen"][0]},
        {"name": "default", "template": FAMILIES["Qwen"][0]},
    ]
    tokenizer = save_tokenizer(tmp_path, engine, eos_token="<|im_end|>", chat_template=named)
    chat = chat_format(tokenizer)
    plain = one(tokenizer, chat, Conversation(TALK[:2]))
    tools = one(tokenizer, chat, Conversation(TALK[:2], [{"name": "f"}]))
    assert tokenizer.decode(tools.ids) == "T" + tokenizer.decode(plain.ids)


def test_variables_of_a_template_change_its_prompt_and_the_cache(tmp_path, engine):
    """Templates of hybrid thinking models begin a thought unless a variable says no."""
    source = turns(
        CHATML_USER,
        CHATML_HEAD + "{{ '<think></think>' + m.content + '<|im_end|>' }}",
        "<|im_start|>assistant\n<think>' + ('</think>' if enable_thinking is false else 'so') + '",
    )
    tokenizer = tokenizer_of(tmp_path, engine, "<|im_end|>", source)
    thinking, plain = (
        chat_format(tokenizer, kwargs=kwargs) for kwargs in (None, '{"enable_thinking": false}')
    )
    [refused] = encode(tokenizer, thinking, Conversation(TALK[:2]))
    assert refused.reason == "template_prefix"
    document = one(tokenizer, plain, Conversation(TALK[:2]))
    assert marked(tokenizer, document).endswith("<think></think>[a<|im_end|>]")
    assert thinking.rules != plain.rules
