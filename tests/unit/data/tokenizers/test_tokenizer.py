"""Tests of tokenizers: special tokens only from a template, the end of a document, and training of
a vocabulary.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, processors

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.line_schema import Text
from megatron_packed.data.tokenizers.base import (
    ByteTokenizer,
    NullTokenizer,
    answer_text,
    vocabulary,
)
from megatron_packed.data.tokenizers.bpe_training import train_bpe
from megatron_packed.data.tokenizers.chat_format import TemplateFormat
from megatron_packed.data.tokenizers.encode import SampleEncoder
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_packed.data.tokenizers.tiktoken_bpe import TikTokenizer
from support.data_helpers import CORPUS, byte_level, conversation, metaspace, save_tokenizer


@pytest.mark.shows("Tokenizer", "bytes")
def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = "aé😀<|im_end|>\0"
    plain, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert plain.tolist() == list(text.encode())
    assert special.tolist() == [*"aé😀".encode(), 258, 0]
    assert tokenizer.decode(plain) == tokenizer.decode(special) == text
    assert tokenizer.decode(special, skip_special=True) == "aé😀\0"
    assert tokenizer.decode([0xFF, tokenizer.eod_id]) == "\ufffd<|endoftext|>"
    assert tokenizer.vocab_size == 260 and plain.dtype == np.int32
    with pytest.raises(DataError, match="260"):
        tokenizer.decode([260])


def test_special_tokens_in_plain_text_are_ordinary_text(tmp_path):
    tokenizer = save_tokenizer(tmp_path, byte_level(), eos_token="</s>")
    text = "Hello</s> there<|im_end|>"
    plain, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
    numbers = set(tokenizer.special_tokens.values())
    assert numbers == {0, 1, 2}
    assert not numbers & set(plain.tolist())
    assert [n for n in special.tolist() if n in numbers] == [0, 2]
    assert tokenizer.decode(plain) == tokenizer.decode(special) == text
    both = tokenizer.encode_batch([text, "x"])
    assert [ids.tolist() for ids in both] == [plain.tolist(), tokenizer.encode("x").tolist()]


def test_the_tokenizers_own_truncation_padding_and_prefix_stay_out_of_the_way(tmp_path):
    engine = byte_level(["<s>", "</s>"])
    engine.enable_truncation(3)
    engine.enable_padding(length=20)
    engine.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = save_tokenizer(tmp_path, engine, eos_token="</s>", bos_token="<s>")
    assert (
        tokenizer.decode(tokenizer.encode("Hello there, how are you")) == "Hello there, how are you"
    )
    assert tokenizer.prefix_ids == (0,)
    named = {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "[PAD]"}
    assert tokenizer.template_variables == named


def test_which_tokenizers_split_cleanly(tmp_path):
    assert save_tokenizer(tmp_path / "a", byte_level(), eos_token="</s>").splits_cleanly
    assert not save_tokenizer(tmp_path / "b", metaspace(), eos_token="</s>").splits_cleanly
    engine = byte_level()
    engine.add_special_tokens(
        [AddedToken("<|end|>", rstrip=True)]
    )  # like a token of Phi-3, which removes the line end after it
    assert not save_tokenizer(tmp_path / "c", engine, eos_token="</s>").splits_cleanly


def test_the_end_of_a_document_is_configured_or_known_and_never_guessed(tmp_path):
    engine = byte_level(["<a>", "<b>", "</s>"])
    assert save_tokenizer(tmp_path / "a", engine, eos_token={"content": "<b>"}).eod_id == 1
    assert (
        save_tokenizer(tmp_path / "b", engine).eod_id == 2
    )  # ``</s>`` is the only usual name in the vocabulary
    padded = save_tokenizer(tmp_path / "c", engine, eos_token="<b>", pad_token="<a>")
    assert (padded.eod_id, padded.pad_id) == (1, 0)
    assert save_tokenizer(tmp_path / "d", engine, eos_token="<b>").pad_id == 1
    size = padded.vocab_size
    assert save_tokenizer(tmp_path / "e", engine, eos_token="<c>").eod_id == size
    with pytest.raises(DataError, match="eos_token is '', which is not in the vocabulary"):
        save_tokenizer(tmp_path / "h", engine, eos_token="")
    with pytest.raises(DataError, match="none"):
        save_tokenizer(tmp_path / "f", byte_level(["<a>"]))
    with pytest.raises(DataError, match=r"</s> and <eos>|<\|endoftext\|> and </s>"):
        save_tokenizer(tmp_path / "g", byte_level(["</s>", "<|endoftext|>"]))


@pytest.mark.shows("Tokenizer", "tokenizer.json")
def test_a_bare_file_a_directory_and_damage(tmp_path):
    directory = save_tokenizer(tmp_path / "a", byte_level(), eos_token="</s>")
    assert (
        HuggingFaceTokenizer(tmp_path / "a" / "tokenizer.json").fingerprint == directory.fingerprint
    )
    assert (
        save_tokenizer(tmp_path / "b", byte_level(), eos_token="<|im_end|>").fingerprint
        != directory.fingerprint
    )
    (tmp_path / "broken.json").write_text('{"version": "1.0"}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for path, part in [
        ("none", "does not exist"),
        ("broken.json", "not a tokenizer"),
        ("binary.json", "not UTF-8"),
    ]:
        with pytest.raises(DataError, match=part):
            HuggingFaceTokenizer(tmp_path / path)
    for name in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        # A broken link is no missing file: its tokens would be lost.
        (tmp_path / "a" / name).symlink_to("lost")
        with pytest.raises(DataError, match=f"{name} cannot be read: No such file or directory"):
            HuggingFaceTokenizer(tmp_path / "a")
        (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        HuggingFaceTokenizer(tmp_path / "a")


@pytest.mark.shows("Tokenizer", "token numbers")
def test_numbers_are_their_own_tokens():
    tokenizer = NullTokenizer(100)
    assert (
        tokenizer.encode("7 0\n 98  99 ").tolist() == [7, 0, 98, 99]
        and tokenizer.encode("").tolist() == []
    )
    assert (
        tokenizer.decode([7, 99]) == "7 99" and tokenizer.decode([7, 99], skip_special=True) == "7"
    )
    assert (tokenizer.vocab_size, tokenizer.eod_id, NullTokenizer(100, 5).eod_id) == (100, 99, 5)
    assert (
        len(
            {
                tokenizer.fingerprint,
                NullTokenizer(100, 5).fingerprint,
                NullTokenizer(101).fingerprint,
            }
        )
        == 3
    )
    lines = [[Text(text)] for text in ("1 2", "100", "-1", "1.5", "two", "\u0663", "9" * 5000, "3")]
    outcomes = SampleEncoder(tokenizer=tokenizer, chat=TemplateFormat(None, tokenizer)).encode(
        lines
    )
    assert [outcome.reason for outcome in outcomes[1:-1]] == ["not_a_token_number"] * 6
    assert [outcomes[place].documents[0].ids.tolist() for place in (0, -1)] == [[1, 2, 99], [3, 99]]
    with pytest.raises(DataError, match="token 100 is not in the tokenizer's vocabulary"):
        tokenizer.decode([100])


@pytest.mark.parametrize(
    "make, package", [(TikTokenizer, "tiktoken"), (SentencePieceTokenizer, "sentencepiece")]
)
def test_a_library_that_is_missing_or_too_old(monkeypatch, tmp_path, make, package):
    (tmp_path / "file").write_text("x")
    for module, said in [
        (None, ", which is not installed"),
        (SimpleNamespace(), r" 0\.\S+ or newer; run `pip install -U"),
    ]:
        monkeypatch.setitem(sys.modules, package, module)
        with pytest.raises(DataError, match=f"needs {package}{said}"):
            make(tmp_path / "file")


def test_a_model_may_have_more_entries_than_its_tokenizer_and_not_fewer():
    tokenizer = ByteTokenizer()
    assert (
        vocabulary(tokenizer, None),
        vocabulary(tokenizer, 260),
        vocabulary(tokenizer, 300),
    ) == (260, 260, 300)
    with pytest.raises(
        DataError, match="--vocab-size 259 is less than the 260 entries of the tokenizer"
    ):
        vocabulary(tokenizer, 259)


def test_generated_tokens_that_the_tokenizer_lacks_have_no_text():
    """A model with a larger --vocab-size can generate them, and its answer is still shown."""
    tokenizer = ByteTokenizer()
    tokens = [*tokenizer.encode(" snow").tolist(), 678, *tokenizer.encode("!").tolist(), 258]
    assert answer_text(tokenizer, tokens) == "snow!"


@pytest.mark.shows("Tokenizer", "BPE trained on the data")
def test_a_vocabulary_trained_on_the_data_is_the_same_every_time(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [conversation(f"{text} {n}", text) for n, text in enumerate(CORPUS)]
    path.write_text(
        "\n".join([*lines, "{"])
        + '\n{"text": "zebra zebra"}\n{"prompt": "yak", "completion": "yak"}'
    )
    first = train_bpe([path], 300, tmp_path / "one")
    second = train_bpe([path], 300, tmp_path / "two")
    assert first.fingerprint == second.fingerprint
    assert (first.vocab_size, first.eod_id, first.pad_id, first.splits_cleanly) == (300, 0, 3, True)
    text = "Hello zebra yak é😀\n"
    assert first.decode(first.encode(text)) == text
    assert len(first.encode(CORPUS[0])) < len(CORPUS[0]) / 2
    stamp = (first.path.stat().st_mtime_ns, first.path.stat().st_ino)
    again = train_bpe([path], 300, tmp_path / "one")
    assert (again.path.stat().st_mtime_ns, again.path.stat().st_ino) == stamp
    assert train_bpe([path], 301, tmp_path / "one").path != first.path
    first.path.write_text("{")
    assert (
        train_bpe([path], 300, tmp_path / "one").fingerprint == second.fingerprint
    )  # the damaged tokenizer is trained again
    with pytest.raises(DataError, match="260"):
        train_bpe([path], 259, tmp_path / "one")
    path.write_text("{\n")
    with pytest.raises(DataError, match="no text"):
        train_bpe([path], 300, tmp_path / "one")


def gpt2(folder):
    return HuggingFaceTokenizer.gpt2(folder / "vocab.json", folder / "merges.txt")


@pytest.mark.shows("Tokenizer", "GPT-2's two files")
def test_gpt2_from_its_two_files(tmp_path):
    engine = byte_level(["<|endoftext|>"])
    engine.model.save(str(tmp_path))
    ours = gpt2(tmp_path)
    whole = save_tokenizer(tmp_path / "whole", engine, eos_token="<|endoftext|>")
    text = "Hello there,  how are\n\nyou? <|endoftext|> é😀"
    assert ours.encode(text).tolist() == whole.encode(text).tolist()
    assert ours.decode(ours.encode(text)) == text
    assert (ours.vocab_size, ours.eod_id, ours.splits_cleanly) == (
        whole.vocab_size,
        whole.eod_id,
        True,
    )
    assert (
        ours.encode("<|endoftext|>", special=True).tolist()
        == [ours.eod_id]
        != ours.encode("<|endoftext|>").tolist()
    )
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(DataError, match="are not a vocabulary and merges of GPT-2"):
        gpt2(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match="which is not in the vocabulary"):
        gpt2(tmp_path)


def test_merges_of_gpt2_that_are_cut_off(tmp_path):
    """A file of merges that is cut off raises an error, because text would become other tokens.

    Up to 100 special tokens that no merge makes are accepted.
    """
    engine = byte_level(["<|endoftext|>", *(f"<{n}>" for n in range(99))])
    engine.model.save(str(tmp_path))
    gpt2(tmp_path)
    merges = (tmp_path / "merges.txt").read_text().splitlines()
    (tmp_path / "merges.txt").write_text("\n".join(merges[:-1]))
    with pytest.raises(
        DataError,
        match=r"101 of the 400 .* not the result of any of the .* merges of .* are cut off",
    ):
        gpt2(tmp_path)


@pytest.mark.parametrize(
    ("number", "part"),
    [
        ("7", "the number '7'"),
        (1.5, "the number 1.5"),
        (-1, "the number -1"),
        (2**40, "the number 1099511627776"),
        (0, "the same num"),
    ],
)
def test_numbers_of_gpt2_that_are_none(tmp_path, number, part):
    """The library passes over an entry without a number."""
    byte_level(["<|endoftext|>"]).model.save(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "zz": number}))
    with pytest.raises(DataError, match=rf"vocab\.json gives {part}.* to an entry"):
        gpt2(tmp_path)


def test_data_without_a_usable_line_says_why(tmp_path):
    """The error names the first bad line and its reason; it does not report an empty file."""
    path = tmp_path / "chat.jsonl"
    path.write_text('\n{"question": "a", "answer": "b"}\n[]\n')
    with pytest.raises(
        DataError,
        match=r"line 2: no_known_field: fields: question, answer; perhaps .*=answer \(a line needs",
    ):
        train_bpe([path], 512, tmp_path / "cache")
