"""Tests with 10,000 hostile lines: no crash, no hang, and counts of lines and tokens that equal
those of the generator.
"""

import gzip
import json
import random
import re
from collections import Counter

import pytest

from megatron_packed.data.errors import EMPTY, DataError
from megatron_packed.data.tokenizers.base import ByteTokenizer
from support.data_helpers import open_files, open_lines
from support.json_lines import read_lines

MAX_LINE = 2**15
TOOL_END = "\n</tool_call><|im_end|>"
WORDS = [
    "alpha",
    "Ωmega",
    "<|im_end|>",
    "<|endoftext|>",
    "😀",
    "{{ 7*7 }}",
    "null",
    "\u2028",
    '"',
    "\\",
    "\t",
    "\n",
    "\0",
]


class Lines:
    """Generator of lines with the expected outcome of each: a reason, "blank", or trained texts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.makers = [
            getattr(self, name)
            for name in dir(Lines)
            if name.startswith(("good_", "bad_", "blank_"))
        ]

    def text(self, low=1, high=6) -> str:
        return "w" + " ".join(
            self.random.choice(WORDS) for _ in range(self.random.randint(low, high))
        )

    def dump(self, value) -> bytes:
        return json.dumps(value, ensure_ascii=self.random.random() < 0.5).encode()

    def messages(self) -> tuple[list[dict], str]:
        messages, trained = [], ""
        if self.random.random() < 0.3:
            messages.append({"role": "system", "content": self.text()})
        for _ in range(self.random.randint(1, 3)):
            messages.append(
                {
                    "role": self.random.choice(["user", "tool"]),
                    "content": self.random.choice(["", self.text()]),
                }
            )
            answer = {"role": "assistant", "content": self.text()}
            trained += answer["content"] + "<|im_end|>"
            messages.append(answer)
        if self.random.random() < 0.3:
            messages.insert(-1, {"role": "assistant", "content": self.text(), "train": False})
        return messages, trained

    def good_conversation(self):
        messages, trained = self.messages()
        return self.dump({"messages": messages}), [trained]

    def good_two_conversations(self):
        (first, one), (second, two) = self.messages(), self.messages()
        system = {"role": "system", "content": self.text()}
        second = [message for message in second if message["role"] != "system"]
        return self.dump({"messages": [*first, system, *second]}), [one, two]

    def good_prompt(self):
        completion = self.text()
        return self.dump(
            {"prompt": self.random.choice(["", self.text()]), "completion": completion}
        ), [completion + "<|endoftext|>"]

    def good_with_marks_around(self):
        line, trained = self.good_conversation()
        return b"\xef\xbb\xbf " + line + b" \r", trained

    def blank_line(self):
        return self.random.choice([b"", b" ", b"\t \r", b"\xef\xbb\xbf"]), "blank"

    def bad_truncated(self):
        line = json.dumps({"messages": self.messages()[0]}).encode()
        return line[: self.random.randint(1, len(line) - 1)], "malformed_json"

    def bad_garbage(self):
        size = self.random.randint(1, 50)
        line = bytes(self.random.choice(b"abc{}[]:,") for _ in range(size)) + b"x"
        return line, "malformed_json"

    def bad_nul(self):
        line, at = self.good_conversation()[0], self.random.randint(0, 10)
        return line[:at] + b"\0" + line[at:], "nul_byte"

    def bad_utf8(self):
        line, _ = self.good_conversation()
        wrong = self.random.choice([b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5"])
        return line[:-2] + wrong + line[-2:], "invalid_utf8"

    def bad_utf16(self):
        return '{"prompt": "a", "completion": "b"}'.encode("utf-16").replace(
            b"\n", b""
        ), "invalid_utf8"

    def bad_surrogate(self):
        return b'{"prompt": "a", "completion": "\\ud83d"}', "lone_surrogate"

    def bad_reserved(self):
        return self.dump({"prompt": "a", "completion": "\ufdd2"}), "reserved_character"

    def bad_long(self):
        prompt = b"x" * self.random.randint(MAX_LINE, 2 * MAX_LINE)
        return b'{"prompt": "%s", "completion": "y"}' % prompt, "line_too_long"

    def bad_deep(self):
        depth = self.random.choice(
            [124, 800, 3000]
        )  # depths that every Python parses, that some parse, that none parses
        call = b'{"a":' * depth + b"1" + b"}" * depth
        line = (
            b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [%s]}]}'
            % call
        )
        return line, "too_deep" if depth > 124 else [
            "\n<tool_call>\n" + json.dumps(json.loads(call)) + TOOL_END
        ]

    def bad_constant(self):
        return b'{"prompt": "a", "completion": "b", "score": NaN}', "nan_literal"

    def bad_number(self):
        return b'{"prompt": "a", "completion": "b", "n": 1%s}' % (b"0" * 5000), "huge_number"

    def bad_twice(self):
        return b'{"prompt": "a", "prompt": "b", "completion": "c"}', "duplicate_key"

    def bad_value(self):
        value = self.random.choice([[], 1, "text", None, True, [{"messages": []}]])
        return self.dump(value), "not_an_object"

    def bad_fields(self):
        return self.dump(
            self.random.choice([{}, {"message": []}, {"completion": "a"}])
        ), "no_known_field"

    def bad_type(self):
        messages, _ = self.messages()
        field, value = self.random.choice(
            [("content", 1), ("content", {}), ("role", None), ("role", ["user"])]
        )
        self.random.choice(messages)[field] = value
        return self.dump({"messages": messages}), "wrong_type"

    def bad_role(self):
        messages, _ = self.messages()
        self.random.choice(messages)["role"] = self.random.choice(
            ["bot", "", "ASSISTANT", "moderator", "<|im_end|>"]
        )
        return self.dump({"messages": messages}), "unknown_role"

    def bad_empty(self):
        return b'{"messages": []}', "empty_messages"

    def bad_silence(self):
        messages, _ = self.messages()
        return self.dump(
            {"messages": [*messages, {"role": "assistant", "content": " "}]}
        ), "empty_assistant"

    def bad_without_assistant(self):
        return self.dump({"messages": [{"role": "user", "content": self.text()}]}), "no_assistant"

    def bad_untrained(self):
        messages = [{"role": "assistant", "content": self.text(), "train": False}]
        return self.dump({"messages": messages}), "all_masked"

    def bad_flag(self):
        messages, _ = self.messages()
        messages[-1]["train"] = self.random.choice(["false", 0, {}])
        return self.dump({"messages": messages}), "bad_train_flag"

    def bad_completion(self):
        return self.random.choice(
            [
                (b'{"prompt": "a"}', "missing_completion"),
                (b'{"prompt": "a", "completion": ""}', "empty_completion"),
            ]
        )


@pytest.mark.timeout(120)
def test_ten_thousand_hostile_lines(tmp_path):
    maker = Lines(seed=1)
    expected: Counter = Counter()
    trained: list[str] = []
    files = [tmp_path / "0.jsonl", tmp_path / "1.jsonl.gz", tmp_path / "2.jsonl.gz"]
    for number, path in enumerate(files):
        lines = []
        for _ in range((4000, 3500, 2500)[number]):
            line, outcome = maker.random.choice(maker.makers)()
            lines.append(line)
            if isinstance(outcome, list):
                trained += outcome
                expected["good"] += 1
            else:
                expected[outcome] += 1
        content = b"\n".join(lines) + b"\n"
        if number == 0:
            path.write_bytes(content)
        elif number == 1:
            path.write_bytes(gzip.compress(content))
        else:  # the gzip stream lacks its trailer after the last line
            path.write_bytes(gzip.compress(content)[:-8])
            expected["corrupt_stream"] += 1
    dataset = open_files(
        files,
        cache_root=tmp_path / "cache",
        max_bad_fraction=1.0,
        max_line_bytes=MAX_LINE,
        num_threads=2,
    )
    report = dataset.report
    assert (report.lines, report.good, report.blank) == (
        10_001,
        expected.pop("good"),
        expected.pop("blank"),
    )
    left_out = {**report.bad, **report.empty}
    assert left_out == expected and set(report.empty) == EMPTY & set(expected)
    assert report.lines == report.good + report.blank + report.num_empty + report.num_bad
    assert min(report.good, *left_out.values()) >= 1
    # the data set has every trained character of every document, in order
    assert len(dataset) == report.documents == len(trained)
    assert (report.tokens, report.target_tokens) == (
        dataset.lengths.sum(),
        dataset.target_counts.sum(),
    )
    for number, text in enumerate(trained):
        tokens, targets = dataset.document(number)
        assert ByteTokenizer().decode(tokens[targets == 1]) in (text, text[1:]), (
            number
        )  # the first token of a document is never a target
    # the quarantine file lists each bad line once, in order, in plain ASCII
    [quarantine] = (tmp_path / "cache").glob("*.quarantine.jsonl")
    entries = [json.loads(line) for line in quarantine.read_text("ascii").splitlines()]
    assert Counter(entry["reason"] for entry in entries) == left_out
    places = [(files.index(type(files[0])(entry["file"])), entry["line"]) for entry in entries]
    assert places == sorted(set(places)) and places[-1] == (2, 2501)


def test_random_damage_to_good_lines_never_crashes(tmp_path):
    maker, damage = Lines(seed=2), random.Random(3)
    lines = []
    for _ in range(3000):
        line = bytearray(maker.good_conversation()[0])
        for _ in range(damage.randint(1, 4)):
            at = damage.randrange(len(line))
            line[at : at + damage.randint(0, 2)] = damage.randbytes(damage.randint(0, 2)).replace(
                b"\n", b""
            )
            line = line or bytearray(b"x")
        lines.append(bytes(line))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    report = open_files([path], max_bad_fraction=1.0).report
    assert report.lines == 3000 == report.good + report.blank + report.num_empty + report.num_bad
    assert report.num_bad > 1000


def test_too_many_bad_lines_are_fatal_and_the_quarantine_stays(tmp_path):
    good, bad = '{"prompt": "a", "completion": "b"}', "{"
    with pytest.raises(
        DataError, match=r"2 of 20 lines are unusable \(10.00%\), more than"
    ) as caught:
        open_lines(tmp_path, [good] * 18 + [bad, "", bad], max_bad_fraction=0.0999)
    [quarantine] = (tmp_path / "cache").glob("*.quarantine.jsonl")
    assert str(quarantine) in str(caught.value)
    first = r".*\.jsonl, line 19: malformed_json: "
    rule = "rule: 2 malformed_json: the line is not valid JSON"
    assert re.search(rf"\n +{rule}.*\n +cure: .*\n +place: {first}", str(caught.value))
    assert [line["line"] for line in read_lines(quarantine)] == [19, 21]
    dataset = open_lines(tmp_path, [good] * 18 + [bad, "", bad], max_bad_fraction=0.1)
    assert len(dataset) == 18 and re.search(
        f"{first}.*; all bad lines are listed in {re.escape(str(quarantine))}$",
        dataset.sentences()[-1],
    )
    with pytest.raises(
        DataError, match="more than --max-bad-fraction"
    ):  # the error is also raised if the cache exists already
        open_lines(tmp_path, [good] * 18 + [bad, "", bad], max_bad_fraction=0.05)


def test_a_hopeless_file_is_given_up_early(tmp_path):
    """A large file is refused after its first lines."""
    with pytest.raises(DataError, match=r"^4096 of the first 4096 lines are unusable"):
        open_lines(tmp_path, ["a,b,c"] * 40_000, max_bad_fraction=0.4)


def test_data_of_the_other_kind_is_an_error_with_a_cure(tmp_path):
    with pytest.raises(DataError, match="add --sft"):
        open_lines(tmp_path, ['{"text": "a"}', '{"prompt": "a", "completion": "b"}'], sft=False)
    with pytest.raises(DataError, match="remove --sft"):
        open_lines(tmp_path, ['{"prompt": "a", "completion": "b"}', '{"text": "a"}'])
    with pytest.raises(DataError, match="no document"):
        open_lines(tmp_path, ["", " "])
