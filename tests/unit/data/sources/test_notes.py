"""Tests of the report: what of used lines is not learned as it is written, by kind and name."""

import json

import pytest

from megatron_packed.data.errors import NOTES, DataError, note_lines
from megatron_packed.data.sources.line_schema import Text, TokenSequence, parse_line
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.chat_format import TemplateFormat
from megatron_packed.data.tokenizers.encode import SampleEncoder
from support.data_helpers import byte_level, marked, open_files, open_lines, save_tokenizer
from support.messages import assistant, user

BYTES = ByteTokenizer()
USER = user("q")
THINKS_LAST = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def line(*answers: str, **more: object) -> str:
    messages = [m for a in answers for m in (USER, assistant(a))]
    return json.dumps({"messages": messages, **more})


def open_with(tmp_path, lines: list[str], chat, sft: bool = True, **options):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(lines))
    options = {"cache_root": tmp_path / "cache", "num_threads": 1, **options}
    return open_files([file], chat=chat, sft=sft, **options)


def test_names_stand_in_the_order_of_their_counts() -> None:
    counts = {"unread_field": {"b": 1, "a": 3, "c": 1}, "letters": {"<s>": 2}}
    assert note_lines(counts, most_names=2) == [
        f"{NOTES['unread_field']}: a (3), b (1) and 1 more",
        f"{NOTES['letters']}: <s> (2)",
    ]


def test_fields_and_letters_are_counted_once_in_the_report_and_again_from_the_cache(tmp_path):
    lines = [line("a <|im_end|>", id=1), line("b", id=2, source="x")]
    for _ in range(2):
        dataset = open_lines(tmp_path, lines)
        assert dataset.report.notes == {
            "unread_field": {"id": 2, "source": 1},
            "letters": {"<|im_end|>": 1},
        }
        assert f"{NOTES['unread_field']}: id (2), source (1)" in dataset.sentences()


def test_fields_of_messages_that_the_template_reads_are_no_loss(tmp_path):
    talk = [{**USER, "mood": "calm"}, assistant("a", score=1)]
    chat = TemplateFormat("{% for m in messages %}{{ m.mood }}{{ m.content }}{% endfor %}", BYTES)
    dataset = open_with(tmp_path, [json.dumps({"messages": talk})], chat)
    assert dataset.report.notes == {"unread_field": {"messages[].score": 1}}


def test_documents_of_answers_with_their_own_history_are_counted_with_their_cost(tmp_path):
    """Two documents of the first line have 27 + 36 tokens more than its last one."""
    lines = [line("a", "b", "c"), line("d")]
    dataset = open_with(tmp_path, lines, TemplateFormat(THINKS_LAST, BYTES))
    report = dataset.report
    assert (report.documents, report.split_conversations, report.split_documents) == (4, 1, 3)
    assert report.split_tokens == int(dataset.lengths[:2].sum()) < int(dataset.lengths[:3].sum())
    assert any("3 of them are from 1 conversation with" in text for text in dataset.sentences())
    last = open_with(tmp_path, lines, TemplateFormat(THINKS_LAST, BYTES, multi_turn="last"))
    assert (last.report.documents, last.report.split_conversations) == (2, 0)
    assert last.report.notes == {"not_served": {"answers of earlier turns": 2}}


def test_last_leaves_out_answers_whose_place_changes_a_token(tmp_path):
    """After "A: ", the served history has one token for the space and the answer."""
    source = "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else ' A: ' }}{{ m.content }}{% endfor %}"
    tokenizer = save_tokenizer(tmp_path, byte_level(), eos_token="</s>")
    chat = TemplateFormat(
        source + "{{ ' A: ' if add_generation_prompt }}", tokenizer, multi_turn="last"
    )
    encoder = SampleEncoder(tokenizer=tokenizer, chat=chat)
    [outcome] = encoder.encode([parse_line(line("are", "today").encode())])
    assert [marked(tokenizer, part) for part in outcome.documents] == [
        "Q: q A: areQ: q A: [today</s>]"
    ]
    assert outcome.notes == {("not_served", "answers of earlier turns"): 1}


RENDERED = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>"


@pytest.mark.parametrize("sft", [False, True])
def test_lines_that_a_template_has_rendered_are_refused_with_the_flag(tmp_path, sft):
    fields = {"prompt": RENDERED, "completion": "b"} if sft else {"text": RENDERED}
    lines = [json.dumps(fields)] * 3
    chat = TemplateFormat(None, BYTES)
    refusal = r"^3 of 3 lines spell turn markers of the tokenizer \(<\|im_end\|>, <\|im_start\|>\)"
    with pytest.raises(DataError, match=refusal) as caught:
        open_with(tmp_path, lines, chat, sft)
    assert "cure: --special-tokens-in-text tokens encodes them" in str(caught.value)
    special = set(BYTES.special_tokens.values()) - {BYTES.eod_id}
    for value, count in (("letters", 0), ("tokens", 4)):
        dataset = open_with(tmp_path, lines, chat, sft, special_tokens_in_text=value)
        assert sum(int(token) in special for token in dataset.document(0)[0]) == count


def test_few_rendered_lines_are_counted_and_the_refusal_comes_from_the_cache_too(tmp_path):
    lines = [json.dumps({"text": "plain"})] * 30 + [json.dumps({"text": RENDERED})] * 2
    chat = TemplateFormat(None, BYTES)
    for _ in range(2):  # tokenised, then read from the cache
        with pytest.raises(DataError, match="2 of 32 lines spell turn markers"):
            open_with(tmp_path, lines, chat, False)
    dataset = open_with(tmp_path, lines, chat, False, max_bad_fraction=0.07)
    assert dataset.report.notes == {"turn_markers": {"<|im_start|>": 2, "<|im_end|>": 2}}


def test_a_completion_learns_its_special_tokens_but_no_turn_marker(tmp_path):
    """A prompt has letters only, and letters can be demanded for both."""
    values = {"prompt": "<|padding|>", "completion": "<|im_end|>a"}
    chat = TemplateFormat(None, BYTES)
    options = {"max_bad_fraction": 1.0}
    dataset = open_with(tmp_path, [json.dumps(values)], chat, **options)
    assert dataset.report.notes["letters"] == {"<|padding|>": 1, "<|im_end|>": 1}
    assert not set(dataset.document(0)[0][:-1].tolist()) & set(BYTES.special_tokens.values())


def test_bad_templates_end_the_run_as_early_as_bad_fields(tmp_path, capsys):
    """Twenty lines are rendered before the others are tokenised."""
    chat = TemplateFormat(
        "{{ raise_exception('no') if messages | length > 1 }}" + THINKS_LAST, BYTES
    )
    lines = [line("a", "b")] * 5000
    refusal = r"(?s)^20 of the first 20 lines are unusable .*rule: 20 template_error: .*line 1: "
    with pytest.raises(DataError, match=refusal):
        open_with(tmp_path, lines, chat, show=True)
    said = capsys.readouterr().err
    assert "4096 of the first 4096 lines" in said and "of 20 that were rendered, 20 fail" in said
    assert "tokenising" not in said


def test_special_tokens_that_a_text_spells_are_counted_by_name(tmp_path):
    tokenizer = save_tokenizer(tmp_path, byte_level(["</s>", "<extra>", "§"]), eos_token="</s>")
    encoder = SampleEncoder(tokenizer=tokenizer, chat=TemplateFormat(None, tokenizer))
    [outcome] = encoder.encode([[Text("a <b><extra> <<extra>> [x] § </s>")]])
    assert outcome.notes == {
        ("letters", token): n for token, n in [("<extra>", 2), ("§", 1), ("</s>", 1)]
    }


def test_a_given_token_outside_of_the_vocabulary_makes_its_line_unusable():
    encoder = SampleEncoder(tokenizer=BYTES, chat=TemplateFormat(None, BYTES))
    good, bad = encoder.encode(
        [[parsed] for parsed in (TokenSequence([1, 2], None), TokenSequence([1, 999], None))]
    )
    assert good.documents[0].ids.tolist() == [1, 2] and good.documents[0].targets.tolist() == [0, 1]
    assert bad.reason == "token_outside" and "999" in bad.detail


def test_a_conversation_whose_answers_are_all_masked_is_empty_and_not_bad(tmp_path):
    talk = {"messages": [USER, assistant("a", weight=0)]}
    dataset = open_lines(tmp_path, [json.dumps(talk), line("a")], max_bad_fraction=0.0)
    assert dataset.report.empty == {"all_masked": 1} and len(dataset) == 1
