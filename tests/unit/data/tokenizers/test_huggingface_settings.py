"""Tests of the files next to a tokenizer.json: tokens, names and templates as in transformers.

Each folder of `FOLDERS` has the tokens that transformers 5.24 gave it. If transformers is
installed, it reads the folders again.
"""

import json
from fnmatch import fnmatch

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_packed.config.hub_paths import TOKENIZER_FILES
from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.tokenizers.base import fingerprint_of
from megatron_packed.data.tokenizers.chat_format import TemplateFormat
from megatron_packed.data.tokenizers.exported_files import files_of_huggingface
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.data.tokenizers.huggingface_settings import (
    ADDED_TOKENS,
    CONFIG,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TEMPLATE,
    TEMPLATE_FOLDER,
)
from megatron_packed.data.tokenizers.untrusted_tokenizer import UntrustedTokenizer

FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
TEXTS = [
    "a <extra> b</extra>  <|im_end|> \n<unk>[PAD]x",
    "<|im_end|>\n\n</s><extra></extra><img> <|im_end|>.",
    "  <extra>a<EXTRA>a </extra>\tword words <b><a>",
]


def flagged(content, flags="special"):
    """Return a token as an object of JSON, with all flags."""
    return {"content": content, **{name: name in flags.split() for name in FLAGS}}


def typed(content, flags="special"):
    return {"__type": "AddedToken", **flagged(content, flags)}


def engine(**padding):
    """Return a tokenizer with 256 bytes, ``<unk>`` (256, an ordinary entry), ``</s>`` (257) and
    ``<|im_end|>`` (258).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    made = Tokenizer(models.BPE({**vocabulary, "<unk>": 256}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>", "<|im_end|>"])
    if padding:
        made.enable_padding(**padding)
    return made


def write(folder, config=None, given=None, added=None, made=None):
    folder.mkdir(parents=True, exist_ok=True)
    (made or engine()).save(str(folder / "tokenizer.json"))
    for name, content in [(CONFIG, config), (SPECIAL_TOKENS_MAP, given), (ADDED_TOKENS, added)]:
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


END, OWN = {"eos_token": "</s>"}, {"</s>": (257, "special"), "<|im_end|>": (258, "special")}


def with_decoder(tokens):
    """Return a tokenizer_config.json whose added_tokens_decoder has these tokens."""
    return {"config": {**END, "added_tokens_decoder": tokens}}


FOLDERS = {
    "a list of extra tokens": (
        {"config": {**END, "extra_special_tokens": ["<extra>", "</extra>"]}},
        {**OWN, "<extra>": (259, "special"), "</extra>": (260, "special")},
        END,
    ),
    "extra tokens with names": (
        {"config": {"extra_special_tokens": {"image_token": "<img>", "b": "<b>"}, **END}},
        {**OWN, "<img>": (259, "special"), "<b>": (260, "special")},
        {**END, "image_token": "<img>", "b": "<b>"},
    ),
    "the older name of extra tokens": (
        {"config": {**END, "additional_special_tokens": ["<extra>", typed("<b>", "lstrip")]}},
        {**OWN, "<extra>": (259, "special"), "<b>": (260, "lstrip")},
        END,
    ),
    "the newer name of extra tokens wins": (
        {
            "config": {
                **END,
                "additional_special_tokens": ["<a>"],
                "extra_special_tokens": ["<b>", "<b>"],
            }
        },
        {**OWN, "<b>": (259, "special")},
        END,
    ),
    "all flags of added_tokens_decoder": (
        with_decoder(
            {
                "260": flagged("</extra>", "normalized single_word"),
                "259": flagged("<extra>", "special lstrip rstrip"),
            }
        ),
        {
            **OWN,
            "<extra>": (259, "special lstrip rstrip"),
            "</extra>": (260, "normalized single_word"),
        },
        END,
    ),
    "numbers with holes are closed": (
        with_decoder({"400": flagged("<b>"), "300": flagged("<a>", "")}),
        {**OWN, "<a>": (259, ""), "<b>": (260, "special")},
        END,
    ),
    "added_tokens_decoder changes flags, not numbers": (
        with_decoder(
            {
                "7": flagged("</s>", "special normalized"),
                "258": flagged("<|im_end|>", "special rstrip"),
            }
        ),
        {"</s>": (257, "special normalized"), "<|im_end|>": (258, "special rstrip")},
        END,
    ),
    "a named token becomes special": (
        {
            "config": {
                **END,
                "unk_token": "<unk>",
                "pad_token": "<a>",
                "added_tokens_decoder": {"259": flagged("<a>", "")},
            }
        },
        {**OWN, "<unk>": (256, "special"), "<a>": (259, "special")},
        {**END, "unk_token": "<unk>", "pad_token": "<a>"},
    ),
    "special_tokens_map.json wins": (
        {
            "config": {**END, "bos_token": "<a>", "pad_token": "</s>"},
            "given": {
                "eos_token": {"content": "<|im_end|>", "lstrip": True},
                "bos_token": None,
                "extra_special_tokens": ["<extra>"],
            },
        },
        {**OWN, "<extra>": (259, "special")},
        {"eos_token": "<|im_end|>", "pad_token": "</s>"},
    ),
    "special_tokens_map.json beside added_tokens_decoder is not read": (
        {
            "config": {**END, "added_tokens_decoder": {}},
            "given": {"eos_token": "<|im_end|>", "pad_token": "<a>"},
            "added": {"<b>": 259},
        },
        OWN,
        END,
    ),
    "added_tokens.json knows which tokens are special": (
        {
            "config": {**END, "extra_special_tokens": ["<extra>"]},
            "given": {"pad_token": "<b>"},
            "added": {"<a>": 261, "<b>": 260, "<extra>": 259},
        },
        {
            **OWN,
            "<extra>": (259, "special"),
            "<b>": (260, "special"),
            "<a>": (261, "normalized"),
        },
        {**END, "pad_token": "<b>"},
    ),
    "the order of new tokens": (
        {
            "config": {
                "extra_special_tokens": ["<extra>"],
                "image_token": "<img>",
                "mask_token": "<b>",
                "eos_token": typed("<a>", "normalized"),
            },
            "added": {"word": 259},
        },
        {
            **OWN,
            "word": (259, "normalized"),
            "<a>": (260, "special normalized"),
            "<b>": (261, "special"),
            "<img>": (262, "special"),
            "<extra>": (263, "special"),
        },
        {"image_token": "<img>", "mask_token": "<b>", "eos_token": "<a>"},
    ),
    "padding of tokenizer.json names a token": (
        {"config": END, "made": engine(pad_token="[PAD]", length=9)},
        {**OWN, "[PAD]": (259, "special")},
        {**END, "pad_token": "[PAD]"},
    ),
}


def _tokens(decoder):
    return {
        token.content: (number, {name for name in FLAGS if getattr(token, name)})
        for number, token in decoder.items()
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_transformers(tmp_path, name):
    files, tokens, named = FOLDERS[name]
    ours = HuggingFaceTokenizer(write(tmp_path, **files))
    for engine_ in (ours._with_specials, ours._plain):
        assert _tokens(engine_.get_added_tokens_decoder()) == {
            content: (number, set(flags.split())) for content, (number, flags) in tokens.items()
        }
    assert ours.template_variables == named
    assert ours.eod_id == tokens[named["eos_token"]][0]
    assert ours.vocab_size == 1 + max(number for number, _ in tokens.values())
    special = {content: number for content, (number, flags) in tokens.items() if "special" in flags}
    assert ours.special_tokens == special
    for content, number in special.items():
        assert ours.encode(content, special=True).tolist() == [number]
        assert number not in ours.encode(content)
        assert ours.decode([number]) == content and ours.decode([number], skip_special=True) == ""


@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_reads_the_same_tokens(tmp_path, name):
    transformers = pytest.importorskip("transformers", "5.20", reason="other rules before")
    files, _, named = FOLDERS[name]
    write(tmp_path, **files)
    ours, theirs = (
        HuggingFaceTokenizer(tmp_path),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
    )
    decoder = ours._with_specials.get_added_tokens_decoder()
    assert _tokens(theirs.added_tokens_decoder) == _tokens(decoder)
    assert theirs.get_vocab() == ours._with_specials.get_vocab(with_added_tokens=True)
    assert theirs.special_tokens_map == named
    for text in TEXTS:
        ids = ours.encode(text, special=True).tolist()
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special=True)


def test_an_object_without_a_type_names_a_token(tmp_path):
    """transformers refuses such objects in tokenizer_config.json, but their meaning is clear."""
    config = {"eos_token": {"content": "<a>"}, "extra_special_tokens": [{"content": "<b>"}]}
    ours = HuggingFaceTokenizer(write(tmp_path, config))
    assert ours.special_tokens == {"</s>": 257, "<|im_end|>": 258, "<a>": 259, "<b>": 260}
    assert ours.eod_id == 259


def test_files_that_change_no_token_change_no_fingerprint(tmp_path):
    """The fingerprint is that of versions before these files were read, for their caches."""
    decoder = {"257": flagged("</s>"), "258": flagged("<|im_end|>")}
    config, given = {**END, "bos_token": "<|im_end|>"}, {"bos_token": "<|im_end|>", **END}
    folders = [
        write(tmp_path / "a", config, given),
        write(tmp_path / "b", {**config, "extra_special_tokens": ["</s>"]}, given),
        write(tmp_path / "c", {**config, "added_tokens_decoder": decoder}, given),
        write(tmp_path / "d", config, given, {"<|im_end|>": 258}),
    ]
    text = (folders[0] / "tokenizer.json").read_text()
    expected = fingerprint_of("hf-1", text, given, 257, ())
    for folder in folders:
        assert HuggingFaceTokenizer(folder).fingerprint == expected
    changed = [
        {**config, "extra_special_tokens": ["<b>"]},
        {**config, "extra_special_tokens": ["<a>"]},
        *(
            {**config, "added_tokens_decoder": {**decoder, "258": flagged("<|im_end|>", flags)}}
            for flags in ("special normalized", "special lstrip")
        ),
    ]
    prints = {
        HuggingFaceTokenizer(write(tmp_path / f"{number}", config, given)).fingerprint
        for number, config in enumerate(changed)
    }
    assert len({expected, *prints}) == 1 + len(changed)


REFUSED = {
    "decoder is no object": (
        {"config": {"added_tokens_decoder": None}},
        r"config.json: added_tokens_decoder is null; it must be an object",
    ),
    "key is no number": (
        {"config": {"added_tokens_decoder": {"x": flagged("<a>")}}},
        r'added_tokens_decoder is "x"; it must be a number',
    ),
    "token without content": (
        {"config": {"added_tokens_decoder": {"259": {"special": True}}}},
        r'a token is {"special": true}; it must be an object with the text `content`',
    ),
    "flag is no flag": (
        {"config": {"added_tokens_decoder": {"259": {"content": "<a>", "special": 1}}}},
        r"special of <a> is 1; it must be true or false",
    ),
    "extra tokens are text": (
        {"config": {"extra_special_tokens": "<a>"}},
        r'extra_special_tokens is "<a>"; it must be a list of tokens',
    ),
    "extra token is a number": (
        {"config": {"extra_special_tokens": [259]}},
        r"extra_special_tokens is 259; it must be text",
    ),
    "named token is a number": (
        {"config": {"eos_token": 257}},
        r"eos_token is 257; it must be text",
    ),
    "number is text": (
        {"config": END, "added": {"<a>": "259"}},
        r'added_tokens.json: <a> is "259"; it must be a number',
    ),
    "two tokens of one number": (
        {"config": END, "added": {"<a>": 259, "<b>": 259}},
        r"added_tokens.json gives the number 259 to '<b>', but the token 259 is '<a>'; correct the",
    ),
    "number of another token": (
        with_decoder({"258": flagged("<a>")}),
        r"_config.json gives the number 258 to '<a>', but the token 258 is '<\|im_end\|>'; correct the",
    ),
    "number of another added token": (
        {"config": END, "added": {"<a>": 258}},
        r"added_tokens.json gives the number 258 to '<a>', but the token 258 is '<\|im_end\|>'",
    ),
    "end token only in the file that is not read": (
        {"config": {"added_tokens_decoder": {}}, "given": END, "made": Tokenizer(models.BPE())},
        r"add eos_token to tokenizer_config.json, because special_tokens_map.json is not read",
    ),
    "the library gives a number twice": (
        {
            "config": {"eos_token": "a", "extra_special_tokens": ["<a>", "<b>", "<c>"]},
            "made": Tokenizer(models.WordLevel({"a": 0, "b": 4, "c": 1}, unk_token="a")),
        },
        r"has 3 tokens, but numbers up to 4, .* the new token '<b>' the number 4 of 'b'; number the",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_meant_are_refused(tmp_path, name):
    files, message = REFUSED[name]
    write(tmp_path, **files)
    with pytest.raises(DataError, match=message):
        HuggingFaceTokenizer(tmp_path)


def test_flags_decide_where_a_token_is_found(tmp_path):
    """``lstrip`` takes the space before a token, so pieces cannot be encoded separately."""
    flags = {"259": flagged("<extra>", "special lstrip")}
    ours = HuggingFaceTokenizer(write(tmp_path, {**END, "added_tokens_decoder": flags}))
    assert ours.encode("a  <extra>", special=True).tolist() == [*ours.encode("a"), 259]
    assert not ours.splits_cleanly


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]


@pytest.mark.parametrize(
    "config, files, expected",
    [
        ({}, {}, (None, None)),
        ({"chat_template": "D"}, {}, ("D", None)),
        ({"chat_template": NAMED}, {}, ("D", "T")),
        ({"chat_template": {"default": "D", "tool_use": "T"}}, {}, ("D", "T")),
        ({"chat_template": NAMED}, {"chat_template.jinja": "F"}, ("F", None)),
        (
            {"chat_template": "D"},
            {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "A"},
            ("F", "A"),
        ),
        ({}, {PROCESSOR_TEMPLATE: '{"chat_template": "P"}'}, ("P", None)),
        ({}, {PROCESSOR_TEMPLATE: "{}"}, (None, None)),
        ({"chat_template": "D"}, {PROCESSOR_TEMPLATE: '{"chat_template": "P"}'}, ("D", None)),
        (
            {},
            {PROCESSOR_TEMPLATE: '{"chat_template": "P"}', "chat_template.jinja": "F"},
            ("F", None),
        ),
        ({}, {"additional_chat_templates/default.jinja": "A"}, ("A", None)),
        ({}, {"chat_template.jinja": "F", "additional_chat_templates/rag.jinja": "A"}, ("F", None)),
    ],
)
def test_named_templates(tmp_path, config, files, expected):
    write(tmp_path, {**END, **config})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    ours = HuggingFaceTokenizer(tmp_path)
    assert (ours.chat_template, ours.tool_chat_template) == expected
    there = UntrustedTokenizer("tokenizer.json", str(tmp_path))
    assert there.tool_chat_template == expected[1]
    there.close()


def test_a_missing_default_template_is_an_error_only_where_it_is_needed(tmp_path):
    """The tokenizer serves plain text and conversations with tools, as in transformers."""
    names = [{"name": name, "template": "T"} for name in ("tool_use", 'it\'s {{ "odd" }}')]
    ours = HuggingFaceTokenizer(write(tmp_path, {**END, "chat_template": names}))
    assert ours.tool_chat_template == "T"
    chat = TemplateFormat(ours.chat_template, ours)
    with pytest.raises(
        BadLine, match=r"\(tool_use, it's {{ \"odd\" }}\) has the name `default`; give --chat"
    ):
        chat.complete_text([{"role": "user", "content": "a"}])
    chat.close()


@pytest.mark.parametrize("file", [CONFIG, PROCESSOR_TEMPLATE])
@pytest.mark.parametrize("wrong", [7, [1], [{"name": "default"}], [{"template": "D"}], {"a": 1}])
def test_chat_templates_of_a_wrong_type(tmp_path, wrong, file):
    write(tmp_path, END)
    fields = {**(END if file == CONFIG else {}), "chat_template": wrong}
    (tmp_path / file).write_text(json.dumps(fields))
    said = f"{file}: chat_template must be text or a list of named templates"
    with pytest.raises(DataError, match=said):
        HuggingFaceTokenizer(tmp_path)


def test_transformers_gives_the_template_of_a_processor_to_no_tokenizer(tmp_path):
    """A processor of transformers has it, and so has the tokenizer here."""
    transformers = pytest.importorskip("transformers")
    write(tmp_path, END)
    (tmp_path / PROCESSOR_TEMPLATE).write_text(json.dumps({"chat_template": "P"}))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template is None
    fields, _ = transformers.ProcessorMixin.get_processor_dict(tmp_path)
    assert fields["chat_template"] == HuggingFaceTokenizer(tmp_path).chat_template == "P"


def test_an_export_is_read_back_with_its_tokens_and_templates(tmp_path):
    write(tmp_path / "a", END, {"eos_token": "<|im_end|>"}, {"<a>": 259})
    (tmp_path / "a" / TEMPLATE).write_text("F")
    (tmp_path / "a" / TEMPLATE_FOLDER).mkdir()
    (tmp_path / "a" / TEMPLATE_FOLDER / "tool_use.jinja").write_text("A")
    own = HuggingFaceTokenizer(tmp_path / "a")
    for trained, expected in [(None, ("F", "A")), ("F", ("F", "A")), ("X", ("X", None))]:
        files = files_of_huggingface(tmp_path / "a", trained)
        folder = tmp_path / f"b {trained}"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content if isinstance(content, str) else content.read_text())
        back = HuggingFaceTokenizer(folder)
        assert (back.chat_template, back.tool_chat_template) == expected
        assert back.fingerprint == own.fingerprint and back.eod_id == 258
        assert back.encode("<a>").tolist() == [259]


def test_a_download_has_all_files_that_are_read():
    read = ["tokenizer.json", CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, TEMPLATE]
    read += [PROCESSOR_TEMPLATE]
    for name in [*read, f"{TEMPLATE_FOLDER}/tool_use.jinja"]:
        assert any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES), name
