"""Tests of JSON arrays: each element is one line, and damage never makes a wrong element."""

import gzip
import json
import lzma
import random
import subprocess

import pytest

from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.sources.json_objects import check_no_wrapped_list
from megatron_packed.data.sources.jsonl_lines import LineReader
from megatron_packed.data.sources.line_schema import FIELDS, object_of_line
from megatron_packed.data.sources.source_files import reader_of
from support.data_helpers import open_lines, with_peak

ELEMENTS = [
    {"text": 'quotes \\" " and \\ '},
    {"text": "], {[", "deep": [[], {"a": [{}]}]},
    {"text": "ü😀", "end": "\\"},
    {"text": ""},
]


def elements(path, **options):
    return [(line.number, line.data, line.reason) for line in LineReader(path, **options)]


def values(path):
    """Return the objects of the usable elements, and the reasons of the unusable elements."""
    good, bad = [], []
    for line in LineReader(path):
        assert line.kind == "element"
        try:
            if line.reason is not None:
                raise BadLine(line.reason)
            good += [] if line.is_blank else [object_of_line(line.data)]
        except BadLine as error:
            bad.append((line.number, error.reason))
    return good, bad


@pytest.mark.parametrize("block", [1, 2, 5, 2**20])
@pytest.mark.parametrize("indent", [None, 0, 2])
def test_arrays_on_one_line_and_pretty_printed(tmp_path, monkeypatch, block, indent):
    monkeypatch.setattr("megatron_packed.data.sources.compression._READ_BYTES", block)
    path = tmp_path / "a.json"
    for escape in (True, False):
        text = json.dumps(ELEMENTS, indent=indent, ensure_ascii=escape)
        path.write_bytes(b"\xef\xbb\xbf\r\n " + text.encode() + b"\n\n")
        assert values(path) == (ELEMENTS, [])
        path.write_bytes(gzip.compress(text.encode()))
        assert values(path) == (ELEMENTS, [])


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_that_is_cut_at_any_byte_ends_with_one_bad_element(tmp_path, indent):
    """No cut raises an exception, changes an element or ends without a bad element."""
    path, text = tmp_path / "a.json", json.dumps(ELEMENTS, indent=indent).encode()
    first = text.index(b"[") + 1
    for stop in range(first, len(text)):
        path.write_bytes(text[:stop])
        good, bad = values(path)
        assert good == ELEMENTS[: len(good)], stop
        assert bad == [(len(good) + 1, "corrupt_array")], stop
    packed = gzip.compress(text)
    path.write_bytes(packed[:-9])
    assert values(path)[1][-1][1] == "corrupt_stream"


def test_a_changed_byte_never_makes_an_exception_and_good_elements_stay(tmp_path):
    """Elements before the changed byte are unchanged."""
    path, text = tmp_path / "a.json", bytearray(json.dumps(ELEMENTS, indent=1).encode())
    ends = [json.dumps(ELEMENTS[: n + 1], indent=1).rindex("}") + 1 for n in range(3)]
    ends.append(text.rindex(b"]"))
    draw = random.Random(0)
    for at in range(1, len(text)):
        changed = text[:at] + bytes([draw.choice(b'[]{},:"\\x \n\xff')]) + text[at + 1 :]
        path.write_bytes(changed)
        good, bad = values(path)
        whole = sum(end < at for end in ends)
        assert good[:whole] == ELEMENTS[:whole], (at, changed)
        assert len(good) + len(bad) <= 2 * len(ELEMENTS)


@pytest.mark.parametrize(
    "text, count, bad",
    [
        ("[]", 0, []),
        (" [\n] \n[{}]", 1, []),  # arrays that were joined
        ("[{}, {},]", 2, []),
        ("[{}, oops, {}]", 2, [(2, "malformed_json")]),
        ("[{}, 1, [], {}]", 2, [(2, "not_an_object"), (3, "not_an_object")]),
        ('[{}, {"a": NaN}, {"a": 1, "a": 2}]', 1, [(2, "nan_literal"), (3, "duplicate_key")]),
        ("[{} {}, {}]", 1, [(1, "malformed_json")]),
        ("[{}}, {}]", 1, [(1, "malformed_json")]),
        ('[{"a": 1]}, {}]', 1, [(1, "malformed_json")]),
        ("[{}], {}", 1, [(2, "corrupt_array")]),
        ("[{}]]", 1, [(2, "corrupt_array")]),
        ('[{}]\n{"text": "a"}', 1, [(2, "corrupt_array")]),
        ("[{}, {", 1, [(2, "corrupt_array")]),
        ("[", 0, [(1, "corrupt_array")]),
        ("[{}, " + "[" * 1000 + "]" * 1000 + ", {}]", 2, [(2, "too_deep")]),
        ('[{}, {"a": "\\ud800"}]', 1, [(2, "lone_surrogate")]),
    ],
)
def test_bad_elements_are_numbered_and_the_rest_is_read(tmp_path, text, count, bad):
    path = tmp_path / "a.json"
    path.write_text(text)
    good, found = values(path)
    assert (len(good), found) == (count, bad)


def test_a_long_element_is_skipped_in_bounded_memory(tmp_path):
    path = tmp_path / "a.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'[{"a": 1}, {"text": "' + b'x\\"' * (16 * 2**20) + b'"}, {"a": 2}]')
    found, peak = with_peak(elements, path, max_line_bytes=2**20)
    assert [(number, reason) for number, _, reason in found] == [
        (1, None),
        (2, "line_too_long"),
        (3, None),
    ]
    assert found[1][1].startswith(b'{"text": "x') and len(found[1][1]) <= 1024
    assert found[2][1] == b'{"a": 2}' and peak < 8 * 2**20


def test_a_json_file_of_lines_is_read_as_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('\n{"text": "a"}\n[1]\n')
    assert [(line.number, line.kind) for line in LineReader(path)] == [
        (1, "line"),
        (2, "line"),
        (3, "line"),
    ]


def test_the_quarantine_names_the_element(tmp_path):
    good, bad = '{"prompt": "a", "completion": "b"}', '{"prompt": "a"}'
    dataset = open_lines(tmp_path, ["[", f"{good},", f"{bad},", good, "]"], max_bad_fraction=0.5)
    assert len(dataset) == 2
    assert dataset.report.bad == {"missing_completion": 1}
    assert ".jsonl, element 2: missing_completion" in dataset.sentences()[-1]
    [quarantine] = (tmp_path / "cache").glob("*.quarantine.jsonl")
    assert json.loads(quarantine.read_text())["element"] == 2


WRAPPED = [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("key", ["data", "it's \"é😀"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_an_object_that_holds_the_list_is_refused_and_the_printed_command_extracts_it(
    tmp_path, indent, key, suffix
):
    path = tmp_path / f"a file.json{suffix}"
    text = json.dumps({"version": 1, "info": [1], key: WRAPPED}, indent=indent).encode()
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](text))
    with pytest.raises(DataError, match="is one JSON object with its examples under the key"):
        reader_of(path, 2**20, FIELDS)
    with pytest.raises(DataError) as caught:
        check_no_wrapped_list(path, FIELDS)
    command = str(caught.value).split("`", 1)[1].rsplit("`", 1)[0]
    subprocess.run(["bash", "-c", command], check=True)
    assert values(tmp_path / "a file.list.json") == (WRAPPED, [])


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"messages": [{"role": "user"}]}, indent=1),  # an example on several lines
        json.dumps({"other": [{"x": 1}], "text": "a"}),
        '{"other": [{"x": 1}]}\n{"other": [{"x": 1}]}\n',
        '{"other": [{"x": "%s"}]}\n{"other": []}\n' % ("x" * 2**17),
        '{"other": ["a", {"x": 1}]}',
        "",
        "[]",
        "{",
    ],
)
def test_other_objects_are_not_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    check_no_wrapped_list(path, FIELDS)
    if '"other": [{"x": ' in text:
        path.write_text(text.partition("\n")[0].replace("text", "else"))
        with pytest.raises(DataError, match="'other'"):
            check_no_wrapped_list(path, FIELDS)
        check_no_wrapped_list(path, ["other"])
