"""Tests of tiktoken vocabularies: tokens of the library with Megatron's numbers, and damaged files."""

import base64
import json

import numpy as np
import pytest

from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.sources.line_schema import Conversation, Text
from megatron_packed.data.tokenizers.chat_format import TemplateFormat
from megatron_packed.data.tokenizers.encode import SampleEncoder
from megatron_packed.data.tokenizers.tiktoken_bpe import (
    MAX_VOCAB_SIZE,
    PATTERNS,
    SPECIAL_TOKENS,
    TikTokenizer,
)
from support.data_helpers import AWKWARD, one

tiktoken = pytest.importorskip("tiktoken")
MERGES = [
    b"he",
    b"ll",
    b"hell",
    b"hello",
    b" t",
    b" th",
    b" the",
    b"\n\n",
    "é".encode(),
    b"</",
    b"</s",
]
SEQUENCES = [*(bytes([value]) for value in range(256)), *MERGES]
SPECIAL = 20


def entries(sequences):
    return [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(content).decode(),
            "token_str": content.decode(errors="replace"),
        }
        for rank, content in enumerate(sequences)
    ]


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(entries(SEQUENCES)))
    return path


def test_numbers_by_hand(vocabulary):
    tokenizer = TikTokenizer(vocabulary, num_special_tokens=SPECIAL)
    names = [*SPECIAL_TOKENS, *(f"<SPECIAL_{n}>" for n in range(7, SPECIAL))]
    assert list(tokenizer.special_tokens) == names and list(
        tokenizer.special_tokens.values()
    ) == list(range(SPECIAL))
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.pad_id) == (
        SPECIAL + len(SEQUENCES),
        2,
        4,
    )
    hello, the = SPECIAL + SEQUENCES.index(b"hello"), SPECIAL + SEQUENCES.index(b" the")
    assert tokenizer.encode("hello the<SPECIAL_10>", special=True).tolist() == [hello, the, 10]
    plain = tokenizer.encode("hello the<SPECIAL_10>")
    assert (
        plain.tolist() == [hello, the, *(SPECIAL + value for value in b"<SPECIAL_10>")]
        and plain.dtype == np.int32
    )
    assert tokenizer.decode([1, hello, 10, SPECIAL + 0xFF]) == "<s>hello<SPECIAL_10>\ufffd"
    assert tokenizer.decode([1, hello, 10], skip_special=True) == "hello"
    with pytest.raises(DataError, match="token 287 is not in the tokenizer's vocabulary of 287"):
        tokenizer.decode([287])


@pytest.mark.shows("Tokenizer", "tiktoken")
@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_every_token_is_the_librarys(vocabulary, pattern):
    tokenizer = TikTokenizer(vocabulary, pattern, num_special_tokens=SPECIAL)
    library = tiktoken.Encoding(
        name="",
        pat_str=PATTERNS[pattern],
        special_tokens=dict(tokenizer.special_tokens),
        mergeable_ranks={content: SPECIAL + rank for rank, content in enumerate(SEQUENCES)},
    )
    for text in AWKWARD:
        plain, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
        assert plain.tolist() == library.encode_ordinary(text)
        assert special.tolist() == library.encode(text, allowed_special="all")
        assert not plain.size or plain.min() >= SPECIAL
        assert tokenizer.decode(plain) == tokenizer.decode(special) == text
    assert [ids.tolist() for ids in tokenizer.encode_batch(AWKWARD)] == list(
        map(library.encode_ordinary, AWKWARD)
    )
    invalid = [SPECIAL + value for value in b"\xe9\xff\xf0\x9f"]
    assert tokenizer.decode(invalid) == library.decode(invalid) == "\ufffd\ufffd\ufffd"


def test_where_text_is_cut():
    regex = pytest.importorskip("regex")
    text = "don't stopNow 12\n\n  é!?\n/x  \t y_2"
    for pattern, expected in {
        "v1": [
            "don",
            "'t",
            " stopNow",
            " ",
            "1",
            "2",
            "\n\n",
            " ",
            " é",
            "!?\n",
            "/x",
            "  \t",
            " y",
            "_",
            "2",
        ],
        "v2": [
            "don",
            "'t",
            " stop",
            "Now",
            " ",
            "1",
            "2",
            "\n\n",
            " ",
            " é",
            "!?\n/",
            "x",
            "  \t",
            " y",
            "_",
            "2",
        ],
    }.items():
        assert regex.findall(PATTERNS[pattern], text) == expected


def test_the_pattern_decides_what_can_be_merged(tmp_path):
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(entries([*SEQUENCES, b"zQ"])))
    counts = [
        len(TikTokenizer(path, pattern, num_special_tokens=SPECIAL).encode("zQ"))
        for pattern in ("v1", "v2")
    ]
    assert counts == [1, 2]  # v2 cuts before a capital letter


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_against_megatron_core(vocabulary, pattern):
    module = "megatron.core.tokenizers.text.libraries.tiktoken_tokenizer"
    theirs = pytest.importorskip(module, exc_type=ImportError).TikTokenTokenizer(
        str(vocabulary), None, SPECIAL, None, pattern, SPECIAL + 260
    )
    ours = TikTokenizer(vocabulary, pattern, num_special_tokens=SPECIAL, vocab_size=SPECIAL + 260)
    assert (ours.vocab_size, ours.eod_id, ours.pad_id) == (
        theirs.vocab_size,
        theirs.eod,
        theirs.pad_id,
    )
    assert list(ours.special_tokens) == theirs.special_tokens
    for text in AWKWARD:  # Megatron always encodes spellings of special tokens as special tokens
        assert ours.encode(text, special=True).tolist() == theirs.text_to_ids(text)
        assert ours.decode(ours.encode(text)) == theirs.ids_to_text(ours.encode(text).tolist())


def test_both_kinds_of_file_and_the_size(vocabulary, tmp_path):
    lines = tmp_path / "x.tiktoken"
    lines.write_bytes(
        b"".join(base64.b64encode(s) + b" %d\n" % rank for rank, s in enumerate(SEQUENCES))
    )
    one, other = (TikTokenizer(path, num_special_tokens=SPECIAL) for path in (vocabulary, lines))
    assert all(one.encode(text).tolist() == other.encode(text).tolist() for text in AWKWARD)
    cut = TikTokenizer(vocabulary, num_special_tokens=SPECIAL, vocab_size=SPECIAL + 258)
    assert cut.vocab_size == SPECIAL + 258 and len(cut.encode("hello")) == 3 > len(
        one.encode("hello")
    )
    named = TikTokenizer(
        vocabulary, special_tokens=("<a>", "</s>", "<s>", "<unk>"), num_special_tokens=SPECIAL
    )
    assert (named.eod_id, named.pad_id, list(named.special_tokens)[4]) == (1, 1, "<SPECIAL_4>")
    assert named.template_variables == {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    prints = {
        t.fingerprint
        for t in (one, cut, named, TikTokenizer(vocabulary, "v1", num_special_tokens=SPECIAL))
    }
    assert (
        len(prints) == 4
        and TikTokenizer(vocabulary, num_special_tokens=SPECIAL).fingerprint == one.fingerprint
    )


def test_special_tokens_that_leave_no_room_cut_nothing_off_in_silence(vocabulary):
    with pytest.raises(DataError, match="among the 0 entries used"):
        TikTokenizer(vocabulary, num_special_tokens=MAX_VOCAB_SIZE + 1)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"[{]", "is not a tiktoken vocabulary, which is a JSON list"),
        (b'[{"rank": 0}]', "KeyError: 'token_bytes'"),
        (b"[" * 100_000, "RecursionError"),
        (b'["a"]', "is not a tiktoken vocabulary"),
        (b"model\x00\xff", "is not a tiktoken vocabulary"),
        (b"YQ== 0\n! 1\n", "is not a tiktoken vocabulary"),
        (b"YQ== 0\nYg== 0\nYw== 1\n", "its ranks are not 0, 1, 2"),
        (b"YQ== 0\nYg== 2\n", "its ranks are not 0, 1, 2"),
        (b"YQ== 0\nYQ== 1\n", "two ranks have the same bytes"),
        (b"YQ== 0\n", "no entry for 255 of the 256 single bytes among the 1 entries used"),
    ],
)
def test_files_that_are_no_vocabulary(tmp_path, content, said):
    path = tmp_path / "v.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        TikTokenizer(path, num_special_tokens=SPECIAL)


def test_a_vocabulary_that_is_absent_or_too_short(vocabulary, tmp_path):
    with pytest.raises(
        DataError,
        match=r"has 267 entries, but --vocab-size 300 .* leave the option out, or give 287",
    ):
        TikTokenizer(vocabulary, num_special_tokens=SPECIAL, vocab_size=300)
    with pytest.raises(DataError, match=r"absent\.json cannot be read"):
        TikTokenizer(tmp_path / "absent.json")


def test_a_text_that_the_library_does_not_take_is_one_bad_line(vocabulary):
    """A text with a million spaces in a row, on which the library fails, is one bad line."""
    tokenizer = TikTokenizer(vocabulary, num_special_tokens=SPECIAL)
    encoder = SampleEncoder(tokenizer=tokenizer, chat=TemplateFormat(None, tokenizer))
    before, bad, after = encoder.encode(
        [[Text("hello")], [Text("x" + " " * 1_000_000)], [Text("the")]]
    )
    assert isinstance(bad, BadLine) and bad.reason == "tokenizer_failed"
    assert [document.ids[-1] for document in (*before.documents, *after.documents)] == [
        tokenizer.eod_id
    ] * 2


def test_a_template_with_its_special_tokens(vocabulary):
    tokenizer = TikTokenizer(vocabulary, num_special_tokens=SPECIAL)
    source = (
        "{{ bos_token }}{% for m in messages %}<SPECIAL_7>{{ m.content + eos_token }}{% endfor %}"
    )
    chat = TemplateFormat(source, tokenizer)
    talk = [
        {"role": "user", "content": "hi </s><SPECIAL_7>"},
        {"role": "assistant", "content": "hello"},
    ]
    document = one(tokenizer, chat, Conversation(talk))
    chat.close()
    assert [token for token in document.ids.tolist() if token < SPECIAL] == [1, 7, 2, 7, 2]
    assert (
        tokenizer.decode(document.ids) == "<s><SPECIAL_7>hi </s><SPECIAL_7></s><SPECIAL_7>hello</s>"
    )
    assert tokenizer.decode(document.ids[document.targets == 1]) == "<SPECIAL_7>hello</s>"
