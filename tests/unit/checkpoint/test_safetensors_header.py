"""The header: the safetensors library reads it, and forged headers are refused."""

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.safetensors_header import (
    MAX_TENSORS,
    encode_header,
    header_length,
    lay_out,
    parse_header,
)

HERE = Path("file.safetensors")


def parse(file: bytes):
    length = header_length(file[:8], len(file), HERE)
    return parse_header(file[:length], len(file), HERE)


def forge(text: bytes | dict, data: bytes = bytes(8)) -> bytes:
    text = json.dumps(text).encode() if isinstance(text, dict) else text
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_the_library_reads_what_we_write_and_we_read_what_it_writes():
    entries = lay_out(
        [("b[0:3]", torch.uint8, (3,)), ("w[0:2]", torch.float32, (2,)), ("e", torch.int64, (0, 7))]
    )
    file = encode_header(entries, {"step": "7"}, HERE) + struct.pack("<ff3B", 1.5, -2.0, 7, 8, 9)
    found = safetensors.torch.load(file)
    assert found["w[0:2]"].tolist() == [1.5, -2.0] and found["b[0:3]"].tolist() == [7, 8, 9]
    assert found["e"].shape == (0, 7) and parse(file).metadata == {"step": "7"}
    assert parse(file).entries == tuple(sorted(entries, key=lambda e: (e.begin, e.end)))

    theirs = safetensors.torch.save(
        {"x": torch.zeros(3, 5, dtype=torch.bfloat16), "y": torch.ones(2)}, {"a": "b"}
    )
    header = parse(theirs)
    assert {(e.key, e.dtype, e.shape) for e in header.entries} == {
        ("x", torch.bfloat16, (3, 5)),
        ("y", torch.float32, (2,)),
    }


def one(*description, **changes) -> bytes:
    """Return a forged file with one tensor."""
    return forge({"a": tensor(*description, **changes)})


FORGED = {
    "length 2**60": (struct.pack("<Q", 1 << 60) + b"{}", "the header length is out of range"),
    "length past the end": (
        struct.pack("<Q", 99) + b"{}" + bytes(8),
        "the header length is out of range",
    ),
    "length above the limit": (
        struct.pack("<Q", 17 << 20) + bytes(18 << 20),
        "the header length is out of range",
    ),
    "seven bytes": (bytes(7), "too short"),
    "no JSON": (forge(b"{'a'}"), "not strict JSON"),
    "no UTF-8": (forge(b'{"\xff": 1}'), "not strict JSON"),
    "a list": (forge(b"[]"), "not a JSON object"),
    "deep": (forge(b'{"a":' * 200_000), "nested too deeply"),
    "many digits": (forge(b'{"a":' + b"9" * 100_000 + b"}"), "not strict JSON"),
    "NaN": (forge(b'{"a": NaN}'), "NaN is not JSON"),
    "a name twice": (
        forge(b'{"a": %b, "a": %b}' % ((json.dumps(tensor()).encode(),) * 2)),
        "'a' occurs twice",
    ),
    "a field twice": (forge(b'{"a": {"dtype": "F32", "dtype": "U8"}}'), "'dtype' occurs twice"),
    "overlap": (forge({"a": tensor(), "b": tensor(offsets=(4, 12))}, bytes(12)), "overlaps"),
    "same bytes": (forge({"a": tensor(), "b": tensor()}), "overlaps"),
    "hole": (forge({"a": tensor(offsets=(8, 16))}, bytes(16)), "leaves a gap"),
    "past the end": (one(shape=(4,), offsets=(0, 16)), "do not fill the file"),
    "bytes left over": (forge({"a": tensor()}, bytes(9)), "do not fill the file"),
    "shape lies": (one(shape=(3,)), "expected 12"),
    "dtype lies": (one("F64"), "expected 16"),
    "dtype unknown": (one("F7"), "the dtype of tensor 'a'"),
    "dtype is a list": (one(["F32"]), "the dtype of tensor 'a'"),
    "negative size": (one(shape=(-2, -1)), "the shape of tensor 'a'"),
    "size overflows": (one(shape=(1 << 63, 2)), "the shape of tensor 'a'"),
    "product overflows": (
        one(shape=(1 << 61, 1 << 61, 4, 2)),
        "the byte count of tensor 'a'",
    ),
    "size is a bool": (one(shape=(True, 2)), "the shape of tensor 'a'"),
    "size is a float": (one(shape=(2.0,)), "the shape of tensor 'a'"),
    "offsets backwards": (one(offsets=(8, 0)), "the data offsets of tensor 'a'"),
    "one offset": (one(offsets=(8,)), "the data offsets of tensor 'a'"),
    "unaligned": (
        forge({"a": tensor("U8", (1,), (0, 1)), "b": tensor(offsets=(1, 9))}, bytes(9)),
        "a multiple of 4",
    ),
    "extra field": (forge({"a": {**tensor(), "code": "x"}}), "the description of tensor 'a'"),
    "metadata": (
        forge({"__metadata__": {"a": 1}}, b""),
        "__metadata__ is not an object of strings",
    ),
    "100,001 tensors": (
        forge(
            b"{" + b",".join(b'"%d":{"data_offsets":0}' % i for i in range(MAX_TENSORS + 1)) + b"}"
        ),
        "too many tensors",
    ),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_headers_are_refused_by_name_in_bounded_memory(kind):
    file, message = FORGED[kind]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as error:
            parse(file)
        assert tracemalloc.get_traced_memory()[1] < len(file) * 3 + (1 << 20)
    finally:
        tracemalloc.stop()
    assert str(error.value).startswith("file.safetensors: ") and len(str(error.value)) < 1000


def test_a_header_that_no_reader_takes_is_not_written():
    entries = lay_out([(f"t{i}", torch.uint8, (0,)) for i in range(MAX_TENSORS + 1)])
    with pytest.raises(CheckpointError, match="too many tensors for one file"):
        encode_header(entries, {}, HERE)
