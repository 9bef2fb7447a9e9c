"""Tests of SentencePiece models against the library, token by token, except for special tokens.

The tests train their models in milliseconds.
"""

import io

import pytest

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.line_schema import Conversation, Text
from megatron_packed.data.tokenizers.chat_format import TemplateFormat
from megatron_packed.data.tokenizers.encode import prompt_tokens
from megatron_packed.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from support.data_helpers import AWKWARD, CORPUS, one

sentencepiece = pytest.importorskip("sentencepiece")
MARKS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>"]
AS_IS = {
    "byte_fallback": True,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
}
KINDS = {
    "as Llama 2": {"model_type": "bpe", **AS_IS, "user_defined_symbols": [*MARKS, "<b>"]},
    "as Gemma": {
        "model_type": "unigram",
        **AS_IS,
        "add_dummy_prefix": False,
        "user_defined_symbols": [*MARKS, "<b>"],
    },
    # joins successive spaces, and has no byte pieces
    "as T5": {"model_type": "unigram", "pad_id": 3},
}
TALK = Conversation(
    [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "I am fine."}] * 2
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind, options in KINDS.items():
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=written,
            vocab_size=340,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        (folder / kind).write_bytes(written.getvalue())
    return folder


@pytest.mark.shows("Tokenizer", "SentencePiece")
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_plain_text_is_the_librarys(models, kind):
    tokenizer = SentencePieceTokenizer(models / kind)
    library = sentencepiece.SentencePieceProcessor(model_file=str(models / kind))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (library.vocab_size(), library.eos_id())
    assert tokenizer.pad_id == (library.pad_id() if kind == "as T5" else tokenizer.eod_id)
    assert tokenizer.splits_cleanly == (kind == "as Gemma")
    for text in AWKWARD:
        ids = tokenizer.encode(text).tolist()
        if not any(mark in text for mark in MARKS):
            assert ids == library.encode(text)
            assert tokenizer.decode(ids) == library.decode(ids)
        assert not {*tokenizer.special_tokens.values()} & {*ids}
        assert (
            ids
            == tokenizer.encode_with_offsets(text)[0].tolist()
            == tokenizer.encode_batch([text])[0].tolist()
        )
        if kind != "as T5":
            written = text.replace("▁", " ")  # the library uses this character for a space
            assert (
                tokenizer.decode(ids)
                == tokenizer.decode(tokenizer.encode(text, special=True))
                == written
            )
    invalid = [library.piece_to_id(f"<0x{value:02X}>") for value in b"\xe9\xff"]
    assert kind == "as T5" or tokenizer.decode(invalid) == library.decode(invalid) == "\ufffd\ufffd"
    with pytest.raises(DataError, match="is not in the tokenizer's vocabulary"):
        tokenizer.decode([tokenizer.vocab_size])


@pytest.mark.parametrize("kind", KINDS)
def test_against_megatron_core(models, kind):
    module = "megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer"
    theirs = pytest.importorskip(module, exc_type=ImportError).SentencePieceTokenizer(
        str(models / kind)
    )
    ours = SentencePieceTokenizer(models / kind)
    assert (ours.vocab_size, ours.eod_id) == (theirs.vocab_size, theirs.eod)
    for text in AWKWARD:
        if not any(mark in text for mark in MARKS):
            assert ours.encode(text).tolist() == theirs.text_to_ids(text)


def test_special_tokens(models):
    tokenizer = SentencePieceTokenizer(models / "as Llama 2", ["<b>", "[INST]"])
    size = tokenizer.vocab_size - 1
    assert tokenizer.special_tokens == {
        "<s>": 1,
        "</s>": 2,
        "<|im_start|>": 3,
        "<|im_end|>": 4,
        "<start_of_turn>": 5,
        "<b>": 6,
        "[INST]": size,
    }
    assert tokenizer.template_variables == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
    text = "<s>[INST] Hello<b> there</s>"
    ids, offsets = tokenizer.encode_with_offsets(text, special=True)
    special = set(tokenizer.special_tokens.values())
    assert [int(token) for token in ids if token in special] == [1, size, 6, 2]
    assert (
        tokenizer.decode(ids) == text and tokenizer.decode(ids, skip_special=True) == " Hello there"
    )
    assert "".join(text[start:end] for start, end in offsets) == text
    assert not special & {*tokenizer.encode(text).tolist()}
    prints = {
        SentencePieceTokenizer(models / kind, names).fingerprint
        for kind, names in [("as Llama 2", []), ("as Llama 2", ["<b>"]), ("as Gemma", [])]
    }
    assert len(prints) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_a_conversation(models, kind):
    tokenizer = SentencePieceTokenizer(models / kind, ["<|im_start|>", "<|im_end|>"])
    chat = TemplateFormat(None, tokenizer)
    document = one(tokenizer, chat, TALK)
    trained = tokenizer.decode(document.ids[document.targets == 1])
    assert trained.replace(" ", "") == "Iamfine.<|im_end|>" * 2
    prompt = prompt_tokens(tokenizer, chat, TALK.messages[:1])
    assert (
        document.ids[: len(prompt)].tolist() == prompt and not document.targets[: len(prompt)].any()
    )
    text = one(tokenizer, chat, Text("<|im_end|></s>"))
    assert not {*tokenizer.special_tokens.values()} & {*text.ids[:-1].tolist()}


def test_files_that_are_no_model(models, tmp_path):
    whole = (models / "as T5").read_bytes()
    for name, content in {"text": b"model", "cut": whole[:-30], "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} is not a SentencePiece model"):
            SentencePieceTokenizer(tmp_path / name)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        vocab_size=30,
        eos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "endless").write_bytes(written.getvalue())
    with pytest.raises(DataError, match="has no end-of-sentence token"):
        SentencePieceTokenizer(tmp_path / "endless")
