"""Tests of tokenizers in child processes.

The tokens equal those of a tokenizer in the same process. Tokenizer files that make a library
panic, abort or run forever end with one clear error.
"""

import json
import time

import pytest

from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.tokenizers import untrusted_tokenizer as foreign_tokenizer
from megatron_packed.data.tokenizers.limited_process import Budget, LimitedProcess, Limits
from megatron_packed.data.tokenizers.untrusted_tokenizer import UntrustedTokenizer
from support.data_helpers import byte_level, save_tokenizer

TEXTS = ["a plain text", "", "</s> é 漢 😀", "x" * 3000]


@pytest.fixture
def made(tmp_path):
    """Return a valid tokenizer, and a function that changes parts of its file and loads it."""
    here = save_tokenizer(tmp_path, byte_level())
    file = tmp_path / "tokenizer.json"

    def change(**parts):
        if parts:
            file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
        return UntrustedTokenizer("tokenizer.json", str(tmp_path), limits=LIMITS)

    return here, change


LIMITS = Limits(cpu_seconds=2.0, cpu_seconds_per_mib=30.0, memory_bytes=2**30)


def test_it_encodes_as_the_class_does(made):
    here, change = made
    there = change()
    for attribute in foreign_tokenizer._ATTRIBUTES:
        assert getattr(there, attribute) == getattr(here, attribute), attribute
    for special in (False, True):
        assert [ids.tolist() for ids in there.encode_batch(TEXTS, special=special)] == [
            ids.tolist() for ids in here.encode_batch(TEXTS, special=special)
        ]
        for text in TEXTS:
            for mine, its in zip(
                here.encode_with_offsets(text, special=special),
                there.encode_with_offsets(text, special=special),
            ):
                assert mine.dtype == its.dtype and mine.tolist() == its.tolist()
    ids = here.encode(TEXTS[2], special=True)
    there.close()  # a closed tokenizer stays usable
    assert there.decode(ids) == here.decode(ids)
    assert there.decode(ids, skip_special=True) == here.decode(ids, skip_special=True)
    there.close()


def test_dropout_of_merges_is_off(made):
    here, change = made
    model = json.loads((here.path).read_text())["model"]
    there = change(model={**model, "dropout": 0.9})
    assert {there.encode("a plain text, a plain text").tobytes() for _ in range(20)} == {
        here.encode("a plain text, a plain text").tobytes()
    }
    assert (
        there.fingerprint != here.fingerprint
    )  # a cache that was tokenised with dropout is not reused
    there.close()


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}},  # panics
        {
            "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "x"}
        },  # bare Exception
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "[X]", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {},
            }
        },
        {"normalizer": {"type": "Prepend", "prepend": "a" * 50_000_000}},  # without end
    ],
    ids=["panic", "exception", "template", "endless"],
)
def test_files_that_break_their_library_are_one_sentence(made, parts, capfd):
    started = time.monotonic()
    with pytest.raises(DataError, match=r"tmp|pytest") as raised:
        made[1](**parts)
    assert "\n" not in str(raised.value) and "--tokenizer-model" in str(raised.value)
    assert time.monotonic() - started < 20
    assert capfd.readouterr().err == ""


def test_text_that_breaks_the_library_is_a_bad_line(made):
    pattern = {"Regex": "(a+)+$b|(a|a)*c|(a*)*d"}
    there = made[1](
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
            ],
        }
    )
    with pytest.raises(BadLine, match=r"tokenizer_failed: .*retry-limit"):
        there.encode_batch(["fine", "a" * 40_000])
    assert there.decode(there.encode("fine")) == "fine"
    there.close()


def test_text_that_takes_all_memory_is_a_bad_line(made, tmp_path):
    replace = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 1000}
    made[1](normalizer={"type": "Sequence", "normalizers": [replace] * 3}).close()
    # On a busy machine the text may take 2 s of CPU time before it takes all memory.
    slow = LIMITS._replace(cpu_seconds=60.0)
    there = UntrustedTokenizer("tokenizer.json", str(tmp_path), limits=slow)
    with pytest.raises(BadLine, match=r"tokenizer_limit: .*memory"):
        there.encode("qqqq" * 10)
    assert there.encode("b").size
    there.close()


def test_the_cpu_time_of_a_request_grows_with_its_length():
    limits = Limits(cpu_seconds=20.0, cpu_seconds_per_mib=100.0, memory_bytes=2**32)
    budget = Budget("the child", "requests", "give another", max_in_a_row=1)
    process = LimitedProcess("support.timer_of_child", {}, limits, budget)
    for mebibytes, allowed in ((0, 20.0), (1, 120.0), (0, 20.0)):
        assert float(process.ask(bytes(mebibytes << 20))) == pytest.approx(allowed, abs=1)
    process.close()


def test_slow_requests_have_one_budget():
    budget = Budget("the template", "conversations", "give another", max_in_a_row=3, seconds=10.0)
    for _ in range(1000):
        budget.succeeded(0.9, 100)  # not slow
        budget.succeeded(9.0, 2**20)  # not slow either, because the request is long
    budget.failed(2.0, "why")
    budget.succeeded(4.0, 100)
    budget.failed(2.0, "why")
    with pytest.raises(
        DataError,
        match=r"the template took 12 s of CPU time for 4 slow conversations, but only 10 s are",
    ):
        budget.succeeded(4.0, 100)
