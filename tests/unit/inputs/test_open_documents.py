"""Opening the data of a run: indexed data sets and text, alone, joined, blended and split.

Data that cannot be used is refused.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_packed.config.sections.data import DataConfig
from megatron_packed.data.documents import Documents
from megatron_packed.data.errors import DataError
from megatron_packed.data.index.indexed_file import TokensInFile
from megatron_packed.data.index.indexed_writer import IndexedWriter
from megatron_packed.data.sources.tokenized_dataset import DEFAULT_CACHE_NAME
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.inputs.data_messages import blend_sentences
from megatron_packed.inputs.open_documents import RunDocuments, build_tokenizer, open_documents
from megatron_packed.inputs.plan_packs import plan_training
from support.json_lines import write_texts
from support.run_configs import run_config

END = ByteTokenizer.eod_id


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write indexed sets a and b of 40 and 60 documents that begin with 1 and 2, and 20 texts c."""
    monkeypatch.chdir(tmp_path)
    for prefix, first, count in (("a", 1, 40), ("b", 2, 60)):
        with IndexedWriter(prefix, "<u2") as writer:
            for number in range(count):
                writer.add_document(
                    np.array([first, *[number] * (3 + number % 7), END]), [2, 3 + number % 7]
                )
    write_texts(Path("c.jsonl"), ("c" for _ in range(20)))


def opened(*paths: str, validates: bool = False, tests: bool = False, **options) -> RunDocuments:
    config = DataConfig(data_path=paths, **options)
    return open_documents(config, ByteTokenizer(), validates=validates, tests=tests, show=False)


def tokens(documents: Documents) -> list[list[int]]:
    return [documents.document(number)[0].tolist() for number in range(len(documents))]


def test_an_indexed_data_set() -> None:
    documents = opened("a").train
    assert tokens(documents) == [[1, *[n] * (3 + n % 7), END] for n in range(40)]
    ids, targets = documents.document(8)
    assert targets.tolist() == [0, *[1] * (len(ids) - 1)] and ids.dtype == np.int32
    ids, targets = documents.document(8, 2, 3)
    assert ids.tolist() == [8, 8, 8] and targets[1:].all()
    places, pieces = np.array([8, 9]), np.array([3, documents.lengths[9]])
    assert documents.count_targets(places, places * 0, pieces).tolist() == [
        2,
        documents.lengths[9] - 1,
    ]
    read = opened("a", mmap_bin_files=False).train
    assert tokens(read) == tokens(documents) and isinstance(read._file._values, TokensInFile)
    assert opened("a").sentences == [
        "a: 40 documents, 315 tokens (uint16); the longest document has 11 tokens"
    ]


def test_joined_in_their_order() -> None:
    joined = opened("b", "c.jsonl", "a").train
    assert tokens(joined) == [
        *tokens(opened("b").train),
        *[[ord("c"), END]] * 20,
        *tokens(opened("a").train),
    ]
    each = np.arange(120)
    assert np.array_equal(joined.count_targets(each, each * 0, joined.lengths), joined.lengths - 1)
    assert (
        len(
            {
                opened(*paths).train.content_hash
                for paths in (("a", "b"), ("b", "a"), ("a",), ("b", "c.jsonl"))
            }
        )
        == 4
    )


def test_divided_at_the_documents_where_megatron_divides() -> None:
    documents = opened("a", "b", split="90,5,5", validates=True)
    a, b = tokens(opened("a").train), tokens(opened("b").train)
    assert tokens(documents.train) == [*a[:36], *b[:54]]
    assert tokens(documents.valid) == [*a[36:38], *b[54:57]]
    assert "90 documents train, 5 validate, 5 are left out" in documents.sentences[-1]
    documents = opened("a", "b", split="90,5,5", tests=True)
    assert tokens(documents.test) == [*a[38:], *b[57:]] and documents.valid is None
    assert (
        "90 documents train, 5 validate (unused without --eval-interval), 5 test."
        in documents.sentences[-1]
    )
    documents = opened("a", split="99,0,1", tests=True)
    assert (
        documents.test is None
        and "no test is run, because no document of a is left for it." in documents.sentences[-1]
    )
    with pytest.raises(
        DataError, match=r"--split 99,1 leaves no document of a \(40 documents\) to validate on"
    ):
        opened("a", split="99,1", validates=True)


def test_tokens_are_stored_in_the_folder_of_the_option() -> None:
    opened("c.jsonl", data_cache_path="elsewhere")
    assert list(Path("elsewhere").iterdir()) and not Path(DEFAULT_CACHE_NAME).exists()
    opened("c.jsonl")
    assert Path(DEFAULT_CACHE_NAME).exists()


def test_a_conversation_ends_where_the_option_says() -> None:
    """A document ends with the end of its last turn, or with a token of its own."""
    Path("d.jsonl").write_text(
        json.dumps({"messages": [{"role": r, "content": r} for r in ("user", "assistant")]})
    )
    turn, document = (
        tokens(opened("d.jsonl", sft=True, answer_end=end).train)[0] for end in ("turn", "document")
    )
    assert END not in turn and document[: len(turn)] == turn and document[-1] == END


def test_every_file_of_text_is_divided() -> None:
    write_texts(Path("d.jsonl"), ("d" for _ in range(10)))
    documents = opened("c.jsonl", "d.jsonl", split="8,1,1", validates=True, tests=True)
    c, d = [ord("c"), END], [ord("d"), END]
    assert tokens(documents.train) == [*[c] * 16, *[d] * 8]
    assert tokens(documents.valid) == tokens(documents.test) == [c, c, d]


def test_conversations_are_divided_by_a_draw() -> None:
    """Data sorted by task is divided at random, so that every task is validated on.

    The same data is always divided in the same way, because the random numbers are fixed.
    """

    def conversation(task: int, number: int) -> str:
        messages = [
            {"role": "user", "content": f"{task}"},
            {"role": "assistant", "content": f"{task} {number}"},
        ]
        return json.dumps({"messages": messages})

    Path("tasks.jsonl").write_text(
        "\n".join(conversation(task, number) for task in range(4) for number in range(10))
    )
    options = {"sft": True, "split": "8,1,1", "validates": True, "tests": True}
    documents = opened("tasks.jsonl", **options)
    everything = tokens(opened("tasks.jsonl", sft=True).train)
    numbers = [[everything.index(one) for one in tokens(part)] for part in documents[:3]]
    assert sorted(numbers[0] + numbers[1] + numbers[2]) == list(range(40)) and list(
        map(len, numbers)
    ) == [32, 4, 4]
    assert numbers[1:] == [[27, 15, 13, 21], [22, 35, 17, 24]]
    assert (
        "Divided by --split 8,1,1, drawn at random: 32 documents train" in documents.sentences[-1]
    )
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    Path("t.jinja").write_text(template + "{{ '<|im_end|>' }}{% endfor %}")
    [said, *_] = opened("tasks.jsonl", sft=True, chat_template="t.jinja").sentences
    assert said.startswith("The {% generation %} blocks of the chat template leave out <|im_end|>")
    train = documents.train
    every = np.arange(32)
    assert (
        train.count_targets(every, every * 0, train.lengths).tolist()
        == train.source_targets.tolist()
    )
    assert (
        train.source_lengths.tolist()
        == train.lengths.tolist()
        == [len(everything[n]) for n in numbers[0]]
    )
    in_order = opened("tasks.jsonl", split_order="file", **options)
    assert tokens(in_order.valid) == everything[32:36] and "in file order" in in_order.sentences[-1]
    assert (
        in_order.train.content_hash
        != train.content_hash
        == opened("tasks.jsonl", **options).train.content_hash
    )
    assert DataConfig(data_path=("a",), split="8,1,1").split_order == "file"  # text


@pytest.mark.parametrize(
    ("split", "trained", "learned"),
    [
        ("3,4", 3, "b d e"),
        ("4,2,1", 4, "b d e"),
        ("5,1,1", 5, "b d e fg"),
        ("1,0", 7, "b d e fg h i"),
        ("3,4 shuffled", 3, "b e"),
        ("4,3 shuffled", 4, "b e fg"),
    ],
)
def test_a_vocabulary_is_learned_from_what_trains_alone(
    split: str, trained: int, learned: str
) -> None:
    """A vocabulary is learned only from training documents; 7 documents are in two files.

    Documents f and g are on one line. Without shuffling, the training share may end in that line. The
    shuffled order is g b e f i h d.
    """
    split, _, order = split.partition(" ")

    def line(letters: str) -> str:
        parts = [
            [("system", "s"), ("user", "u"), ("assistant", f"{letter * 9} ")] for letter in letters
        ]
        return json.dumps(
            {"messages": [{"role": role, "content": text} for part in parts for role, text in part]}
        )

    b, d, e, fg, h, i = map(line, ("b", "d", "e", "fg", "h", "i"))
    unusable = ["", "{", json.dumps({"messages": [{"role": "user", "content": "unanswered " * 9}]})]
    Path("both").mkdir()
    Path("both/1.jsonl").write_text("\n".join([*unusable, b, *unusable, d]))
    Path("both/2.jsonl").write_text("\n".join([e, fg, h, *unusable, i]))
    Path("alone.jsonl").write_text("\n".join(map(line, learned.split())))
    options = {"sft": True, "tokenizer_type": "TrainedBPETokenizer", "tokenizer_vocab_size": 300}
    config = DataConfig(
        data_path=("both",),
        split=split,
        split_order=order or "file",
        max_bad_fraction=0.9,
        **options,
    )
    tokenizer = build_tokenizer(config, None)
    assert (
        tokenizer.fingerprint
        == build_tokenizer(DataConfig(data_path=("alone.jsonl",), **options), None).fingerprint
    )
    assert len(open_documents(config, tokenizer, validates=False, show=False).train) == trained


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("c.jsonl", "./c.jsonl"),
        ("c.jsonl", "l*k.jsonl"),
        (".", "c.jsonl"),
        ("a", "./a"),
    ],
)
def test_what_is_trained_on_is_not_evaluated(train: str, test: str) -> None:
    if "*" in test:
        Path("link.jsonl").symlink_to("c.jsonl")
    named = r"[ac]\.(jsonl|idx) is training data too, so it cannot "
    with pytest.raises(DataError, match=f"--test-data-path: .*{named}test the model"):
        opened(train, tests=True, test_data_path=(test,))
    with pytest.raises(DataError, match=f"--valid-data-path: .*{named}validate the model"):
        opened(train, validates=True, valid_data_path=("b", test))


def test_test_data_of_its_own() -> None:
    documents = opened("a", tests=True, test_data_path=("c.jsonl",))
    assert (
        len(documents.test) == 20
        and documents.valid is None
        and opened("a", test_data_path=("b",)).test is None
    )
    with pytest.raises(DataError, match="--test-data-path: "):
        opened("a", tests=True, test_data_path=("absent.jsonl",))


def test_bad_lines_of_validation_data_are_reported() -> None:
    with open("v.jsonl", "w") as file:
        file.write('{"text": "v"}\n' * 3 + '{"text": ""}\n')
    told = opened(
        "a", "c.jsonl", validates=True, valid_data_path=("v.jsonl", "b"), max_bad_fraction=0.5
    ).sentences
    first = told.index(
        "--valid-data-path: 4 lines in 1 file: 3 used (3 text), 0 blank, 1 empty, 0 in quarantine"
    )
    assert told[:first] == opened("a", "c.jsonl").sentences and told[first + 2].startswith(
        "  1 x empty_text: "
    )
    assert told[-1] == opened("b").sentences[0]


def test_a_blend_in_a_plan() -> None:
    config = run_config(
        {"cuda_graph_impl": "none"}, {"data_path": ("3", "a", "1", "c.jsonl"), "split": "9,1"}, 32
    )
    documents = open_documents(config.data, ByteTokenizer(), validates=False, show=False)
    plan, _, report = plan_training(config, documents.train)
    drawn = [number for epoch in range(8) for number in plan.epoch(epoch).order]
    of_c = (
        documents.train.lengths[drawn][np.array(drawn) >= 36].sum()
        / documents.train.lengths[drawn].sum()
    )
    assert 0.22 < of_c < 0.28
    assert blend_sentences(config, plan)[1].startswith("  a: 75.00% of the epoch, ")
    assert report.sentences()


def test_a_path_that_is_listed_twice() -> None:
    """Weights of a path are added; without weights, its documents come twice in an epoch."""
    twice, once = (opened(*w, "b") for w in (("2", "a", "1", "b", "1", "a", "2"), ("3", "a", "3")))
    assert twice.train.content_hash == once.train.content_hash
    assert twice.train.weights == once.train.weights and twice.sentences == once.sentences
    options = {"tokenizer_type": "TrainedBPETokenizer", "tokenizer_vocab_size": 261, "split": "8,2"}
    config = DataConfig(data_path=("c.jsonl", "c.jsonl"), **options)
    tokenizer = build_tokenizer(config, None)
    for name, count in (("a", 40), ("c.jsonl", 20)):
        single, double = opened(name), opened(name, name, "b")
        assert tokens(double.train)[: 2 * count] == tokens(single.train) * 2
        assert double.sentences == [*single.sentences, *opened("b").sentences]
    documents = open_documents(config, tokenizer, validates=True, show=False)
    assert (len(documents.train), len(documents.valid)) == (32, 8)


@pytest.mark.parametrize(
    ("paths", "options", "sentence"),
    [
        (("a",), {"sft": True}, "a is an indexed data set, which does not mark"),
        (
            ("a",),
            {"tokenizer_type": "TrainedBPETokenizer"},
            "a is tokenised already, so no TrainedBPETokenizer",
        ),
        (
            ("other",),
            {},
            "document 0 contains token numbers from 1 to 300, but the tokenizer has 260",
        ),
        (("cut",), {}, r"cut\.bin has 2 bytes, but the sequences of cut\.idx need 4"),
    ],
)
def test_what_is_refused(paths: tuple[str, ...], options: dict, sentence: str) -> None:
    for prefix in ("other", "cut"):
        with IndexedWriter(prefix, "<u2") as writer:
            writer.add_document(np.array([1, 300]))
    Path("cut.bin").write_bytes(b"\1\0")
    config = DataConfig(data_path=paths, **options)
    with pytest.raises(DataError, match=sentence):
        open_documents(config, build_tokenizer(config, None), validates=False, show=False)


def test_documents_without_an_end_are_reported() -> None:
    with IndexedWriter("open", "<i4") as writer:
        for size in (1, 0, 3):
            writer.add_document(np.arange(size))
    first, second = opened("open").sentences
    assert (
        "1 documents, 3 tokens (int32)" in first
        and "2 documents of fewer than two tokens are left out" in first
    )
    assert f"ends with token {END}" in second


def test_options_reach_their_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "data.tokenizers.untrusted_tokenizer.UntrustedTokenizer",
        "inputs.open_documents.NullTokenizer",
    ):
        monkeypatch.setattr(f"megatron_packed.{name}", lambda *given: given)
    monkeypatch.setattr(
        "megatron_packed.data.tokenizers.bpe_training.train_bpe",
        lambda paths, size, cache_root, **more: (size, cache_root),
    )

    def given(**options) -> tuple:
        return build_tokenizer(
            DataConfig(data_path=("a",), tokenizer_model=options.pop("model", None), **options), 900
        )

    named = ("<unk>", "<s>", "</s>", "<x>")
    special = {"model": "m", "tokenizer_special_tokens": named}
    tik = given(
        tokenizer_type="TikTokenizer",
        tiktoken_pattern="v1",
        tiktoken_num_special_tokens=9,
        **special,
    )
    assert tik == ("tiktoken", "m", "v1", named, 9, 900)
    assert given(tokenizer_type="SentencePieceTokenizer", **special) == (
        "sentencepiece",
        "m",
        named,
    )
    assert given(tokenizer_type="NullTokenizer", null_tokenizer_eod_id=3) == (900, 3)
    trained = {"tokenizer_type": "TrainedBPETokenizer", "tokenizer_vocab_size": 300}
    config = DataConfig(data_path=("c.jsonl",), data_cache_path="elsewhere", **trained)
    assert build_tokenizer(config, None) == (300, Path("elsewhere"))
    files = {"vocab_file": "v", "merge_file": "m"}
    assert given(**files) == given(tokenizer_type="GPT2BPETokenizer", **files)
    assert given(**files) == ("vocab.json", "v", "m")
