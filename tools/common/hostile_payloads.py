"""Table of hostile files: payload, reader, and the change that makes a sound file hostile."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.hostile_text import (
    BOMBS,
    DEEP,
    ESCAPE,
    JSON,
    YAML,
    Canary,
    archive,
    pickles,
    safetensors_file,
    templates,
)
from common.sound_files import MODEL, TOKENIZER
from support import damaged_megatron

Make = Callable[[Path, Canary], object]
"""Function that changes the copy of the sound files in a folder."""
PACK = "packing --json --seq-length 128"


class Reader(NamedTuple):
    """Command that reads foreign files."""

    files: tuple[str, ...]
    """Sound files that a case copies."""
    words: str
    """Command line in the folder of the copies."""


READERS = {
    "Hugging Face model": Reader(("hf",), "convert --from-hf hf --save out"),
    "original of an export": Reader(
        ("hf", "converted"), "convert --to-hf out --load converted --hf-base hf"
    ),
    "tokenizer": Reader(
        ("tok", "chat.jsonl"), f"{PACK} --sft --train-data-path chat.jsonl {TOKENIZER}"
    ),
    "vocabulary and merges": Reader(
        ("vocab.json", "merges.txt", "text.jsonl"),
        f"{PACK} --train-data-path text.jsonl --vocab-file vocab.json --merge-file merges.txt",
    ),
    "tiktoken": Reader(
        ("vocab.tiktoken", "text.jsonl"),
        f"{PACK} --train-data-path text.jsonl --tokenizer-type TikTokenizer --tokenizer-model "
        "vocab.tiktoken",
    ),
    "SentencePiece": Reader(
        ("piece.model", "text.jsonl"),
        f"{PACK} --train-data-path text.jsonl --tokenizer-type SentencePieceTokenizer "
        "--tokenizer-model piece.model",
    ),
    "template": Reader(
        ("template.jinja", "chat.jsonl"),
        f"{PACK} --sft --train-data-path chat.jsonl --chat-template template.jinja",
    ),
    "Megatron checkpoint": Reader(("megatron",), "convert --from-megatron megatron --save out"),
    "JSON lines": Reader(("chat.jsonl",), f"{PACK} --sft --train-data-path chat.jsonl"),
    "folder of data": Reader(("chat",), f"{PACK} --sft --train-data-path chat"),
    "Parquet": Reader(("text.parquet",), f"{PACK} --train-data-path text.parquet"),
    "saved data set": Reader(("dataset",), f"{PACK} --train-data-path dataset"),
    "indexed data": Reader(
        tuple(f"indexed_text_document.{end}" for end in ("bin", "idx", "crc32c")),
        f"{PACK} --data-path indexed_text_document --tokenizer-type NullTokenizer --vocab-size 256",
    ),
    "prompts": Reader(
        ("ck", "prompts.jsonl", "tok"),
        "generate --load ck --prompts-file prompts.jsonl --max-new-tokens 2 --device cpu",
    ),
    "words of data": Reader(
        ("blend.txt", "chat.jsonl"), f"{PACK} --sft --data-args-path blend.txt"
    ),
    "data of splits": Reader(
        ("splits.json", "chat.jsonl"), f"{PACK} --sft --per-split-data-args-path splits.json"
    ),
    "options in YAML": Reader(
        ("run.yaml", "chat.jsonl"),
        "packing --json --sft --train-data-path chat.jsonl --config run.yaml",
    ),
    "file of flags": Reader(("run.args", "chat.jsonl"), "packing --json @run.args"),
    "Megatron YAML": Reader(("model_config.yaml",), "from-megatron model_config.yaml"),
    "Megatron script": Reader(("train.sh",), "from-megatron train.sh"),
    "own checkpoint": Reader(
        ("ck", "tok"), "generate --load ck --prompt Hello --max-new-tokens 2 --device cpu"
    ),
    "log in a report": Reader(("log.jsonl",), "report log.jsonl --out page.html"),
    "log in a plot": Reader(("log.jsonl",), "plot log.jsonl --out page.html"),
    "log of a run": Reader(
        ("log.jsonl", "ck", "tok", "chat.jsonl"),
        f"train --nproc-per-node 1 {MODEL} {TOKENIZER} --train-data-path chat.jsonl --train-iters 3 "
        "--save ck --load ck --log-jsonl log.jsonl",
    ),
    "lengths": Reader(("lengths.txt",), "tune --json --seq-length 128 --lengths lengths.txt"),
    "costs": Reader(
        ("lengths.txt", "costs.json"),
        "tune --json --seq-length 128 --lengths lengths.txt --costs costs.json",
    ),
}


class Payload(NamedTuple):
    """Change of a reader's files, after which the reader must refuse them."""

    reader: str
    name: str
    make: Make
    harmless: bool = False
    """The result may also be that of the sound files, because the payload changes nothing that counts."""


def payloads() -> Iterator[Payload]:
    """Yield all payloads; each has another pair of reader and name."""
    yield from _special_files()
    yield from _json_files()
    yield from _models()
    yield from _tokenizers()
    yield from _megatron()
    yield from _data()
    yield from _options()
    yield from _checkpoints()
    yield from _logs()


# -------------------------------------------------------------------------------------------------
# changes of files


def write(name: str, content: str | bytes) -> Make:
    """Return a function that replaces a file's content."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda folder, _: (folder / name).write_bytes(data)


def fields(name: str, **changes: Any) -> Make:
    """Return a function that sets fields of a JSON object; a text with ``RAW`` is put in as it is."""

    def make(folder: Path, canary: Canary) -> None:
        found = json.loads((folder / name).read_text())
        found.update(changes)
        text = json.dumps(found)
        for value in changes.values():
            if isinstance(value, str) and value.startswith("RAW"):
                text = text.replace(json.dumps(value), value[3:])
        (folder / name).write_text(text)

    return make


def edited(name: str, edit: Callable[[Any], object]) -> Make:
    """Return a function that changes the value of a JSON file in place."""

    def make(folder: Path, canary: Canary) -> None:
        value = json.loads((folder / name).read_text())
        edit(value)
        (folder / name).write_text(json.dumps(value))

    return make


def appended(name: str, line: str) -> Make:
    """Return a function that puts a line before those of a file and after them."""

    def make(folder: Path, canary: Canary) -> None:
        path = folder / name
        old = path.read_bytes()
        new = line.encode("utf-8", "surrogatepass") + b"\n"
        path.write_bytes(new + old + new)

    return make


def replaced(name: str, place: Callable[[Path, Canary], object]) -> Make:
    """Return a function that removes a file and makes something else in its place."""

    def make(folder: Path, canary: Canary) -> None:
        (folder / name).unlink(missing_ok=True)
        place(folder / name, canary)

    return make


def _sparse(path: Path, _canary: Canary) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


SPECIAL: dict[str, Callable[[Path, Canary], object]] = {
    "a pipe": lambda path, _: os.mkfifo(path),
    "a link to /dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "a directory": lambda path, _: path.mkdir(),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "3 GiB of zeros": _sparse,
}
"""Things in the place of a file."""
PLACES = {
    "Hugging Face model": ("hf/config.json", "hf/model.safetensors", "hf/generation_config.json"),
    "tokenizer": tuple(
        f"tok/{name}.json" for name in ("tokenizer", "tokenizer_config", "special_tokens_map")
    ),
    "vocabulary and merges": ("vocab.json", "merges.txt"),
    "tiktoken": ("vocab.tiktoken",),
    "SentencePiece": ("piece.model",),
    "template": ("template.jinja",),
    "Megatron checkpoint": ("megatron/.metadata", "megatron/common.pt", "megatron/__0_0.distcp"),
    "JSON lines": ("chat.jsonl",),
    "folder of data": ("chat/a.jsonl",),
    "Parquet": ("text.parquet",),
    "saved data set": ("dataset/state.json", "dataset/data.arrow"),
    "indexed data": tuple(f"indexed_text_document.{end}" for end in ("bin", "idx", "crc32c")),
    "prompts": ("prompts.jsonl",),
    "words of data": ("blend.txt",),
    "data of splits": ("splits.json",),
    "options in YAML": ("run.yaml",),
    "file of flags": ("run.args",),
    "Megatron YAML": ("model_config.yaml",),
    "Megatron script": ("train.sh",),
    "own checkpoint": (
        "ck/step_00000002/manifest.json",
        "ck/step_00000002/rank_00000.safetensors",
        "ck/step_00000002/template.jinja",
    ),
    "log in a report": ("log.jsonl",),
    "log in a plot": ("log.jsonl",),
    "log of a run": ("log.jsonl",),
    "lengths": ("lengths.txt",),
    "costs": ("costs.json",),
}
"""Files of each reader that something else replaces."""
PIPES = ("prompts", "lengths", "log in a report", "log in a plot")
"""Readers that take the pipe of a shell's ``<(command)``, and so wait for its writer."""


def _special_files() -> Iterator[Payload]:
    for reader, names in PLACES.items():
        for name in names:
            for kind, place in SPECIAL.items():
                # A user may give a pipe to these, and any folder is a folder of data.
                if (kind == "a pipe" and reader in PIPES) or (
                    kind == "a directory" and reader == "folder of data"
                ):
                    continue
                yield Payload(reader, f"{kind} as {name}", replaced(name, place))
    # The file `latest` only says where to look first.
    for kind, place in SPECIAL.items():
        yield Payload(
            "own checkpoint", f"{kind} as latest", replaced("ck/latest", place), harmless=True
        )


OBJECTS = {
    "Hugging Face model": ("hf/config.json", "hf/generation_config.json"),
    "tokenizer": PLACES["tokenizer"],
    "vocabulary and merges": ("vocab.json",),
    "tiktoken": ("vocab.tiktoken",),
    "saved data set": ("dataset/state.json",),
    "data of splits": ("splits.json",),
    "own checkpoint": ("ck/step_00000002/manifest.json",),
    "costs": ("costs.json",),
}
"""JSON files of each reader, which are one object."""
OPTIONAL = (
    "hf/generation_config.json",
    "tok/tokenizer_config.json",
    "tok/special_tokens_map.json",
)
"""Files without which a reader has defaults."""


def _json_files() -> Iterator[Payload]:
    for reader, names in OBJECTS.items():
        for name in names:
            for kind, text in JSON.items():
                # An object of unknown keys is like an empty one, which optional files may be.
                valid = name in OPTIONAL and kind in ("twice", "half of a surrogate pair")
                yield Payload(reader, f"{kind}: {name}", write(name, text), harmless=valid)


# -------------------------------------------------------------------------------------------------
# Hugging Face models and tokenizers


def _header_edited(edit: Callable[[dict[str, Any]], object]) -> Make:
    """Return a function that changes the header of a safetensors file and keeps its data."""

    def make(folder: Path, canary: Canary) -> None:
        path = folder / "hf/model.safetensors"
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        edit(header)
        path.write_bytes(safetensors_file(header, data[8 + size :]))

    return make


def _first(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """Return a function that changes the entry of a header's first tensor."""

    def edit(header: dict[str, Any]) -> None:
        next(entry for name, entry in header.items() if name != "__metadata__").update(changes)

    return edit


def _renamed(new: str) -> Callable[[dict[str, Any]], object]:
    """Return a function that renames a header's first tensor."""

    def edit(header: dict[str, Any]) -> None:
        name = next(name for name in header if name != "__metadata__")
        header[new] = header.pop(name)

    return edit


def _indexed(shard: str) -> Make:
    """Return a function that names another file in an index in place of the single file."""

    def make(folder: Path, canary: Canary) -> None:
        path = folder / "hf/model.safetensors"
        size = struct.unpack("<Q", path.read_bytes()[:8])[0]
        names = [name for name in json.loads(path.read_bytes()[8 : 8 + size]) if name[0] != "_"]
        path.rename(canary.outside / "model.safetensors")
        named = shard.replace("OUTSIDE", str(canary.outside))
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, named)}
        (folder / "hf/model.safetensors.index.json").write_text(json.dumps(index))

    return make


def _only_a_pickle(name: str, kind: str) -> Make:
    def make(folder: Path, canary: Canary) -> None:
        (folder / "hf/model.safetensors").unlink()
        (folder / "hf" / name).write_bytes(archive(pickles(canary)[kind]))

    return make


def _remote_code(folder: Path, canary: Canary) -> None:
    names = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    fields("hf/config.json", auto_map=names)(folder, canary)
    code = f"open({str(canary.file)!r}, 'w')\nclass C: pass\nclass M: pass\n"
    for name in ("modeling_x.py", "configuration_x.py", "__init__.py"):
        (folder / "hf" / name).write_text(code)


CONFIG = {
    "hidden_size of 1,000 digits": {"hidden_size": "RAW" + "9" * 1000},
    "hidden_size of 10^6 digits": {"hidden_size": "RAW" + "9" * 10**6},
    "hidden_size 10^12": {"hidden_size": 10**12},
    "hidden_size negative": {"hidden_size": -32},
    "hidden_size true": {"hidden_size": True},
    "10^9 layers": {"num_hidden_layers": 10**9},
    "10^6 layers": {"num_hidden_layers": 10**6},
    "no head": {"num_attention_heads": 0},
    "NaN": {"rms_norm_eps": "RAWNaN"},
    "Infinity": {"rms_norm_eps": "RAWInfinity"},
    "1e999": {"rms_norm_eps": "RAW1e999"},
    "a float of 10^5 digits": {"rms_norm_eps": "RAW0." + "0" * 10**5 + "1"},
    "trust_remote_code": {"trust_remote_code": True},
    "control characters": {"model_type": f"llama{ESCAPE}"},
    "a key with control characters": {f"x{ESCAPE}": 1},
    "vocab_size 2^62": {"vocab_size": 2**62},
    "model_type list": {"model_type": ["llama"]},
    "model_type of 10 MB": {"model_type": "x" * 10_000_000},
    "deep rope_parameters": {"rope_parameters": "RAW" + '{"a":' * 900 + "1" + "}" * 900},
}
HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "negative offsets": _first(data_offsets=[-8, 8]),
    "offsets of floats": _first(data_offsets=[0.0, 1e3]),
    "offsets after the file": _first(data_offsets=[0, 2**62]),
    "offsets of 1,000 digits": _first(data_offsets=[0, 10**1000]),
    "shape overflow": _first(shape=[2**40, 2**40]),
    "shape negative": _first(shape=[-1, -4]),
    "shape of 10^5 ones": _first(shape=[1] * 10**5),
    "unknown dtype": _first(dtype=f"F{ESCAPE}"),
    "dtype list": _first(dtype=["F32"]),
    "entry list": lambda header: header.update({"a": [1]}),
    "name with control characters": _renamed(f"model{ESCAPE}\n.weight"),
    "name of 1 MB": _renamed("m" * 2**20),
    "name like a path": _renamed("../../etc/passwd"),
    "metadata of lists": lambda header: header.update({"__metadata__": {"a": [1]}}),
}


def _models() -> Iterator[Payload]:
    reader, weights = "Hugging Face model", "hf/model.safetensors"
    yield Payload(reader, "remote code", _remote_code, harmless=True)
    for name, changes in CONFIG.items():
        yield Payload(reader, f"config: {name}", fields("hf/config.json", **changes))
    for name, edit in HEADERS.items():
        yield Payload(reader, f"header: {name}", _header_edited(edit))
        yield Payload("original of an export", f"header: {name}", _header_edited(edit))
    for name, content in {
        "length 2^63": safetensors_file({}, size=2**63),
        "length 200 MB": safetensors_file({}, size=200 << 20),
        "length 0": safetensors_file(b"", size=0),
        "deep": safetensors_file(DEEP.encode()),
        "not UTF-8": safetensors_file(b'{"\xff": 1}'),
        "100 MB of spaces": safetensors_file(b"{" + b" " * 100_000_000 + b"}"),
    }.items():
        yield Payload(reader, f"header: {name}", write(weights, content))
    for shard in (
        "../outside/model.safetensors",
        "OUTSIDE/model.safetensors",
        "/dev/zero",
        f"a{ESCAPE}.safetensors",
        "",
        "..",
        "a\0b",
    ):
        yield Payload(reader, f"index names {shard!r}", _indexed(shard))
    for name in ("pytorch_model.bin", "model.safetensors", "model.pt"):
        for kind in ("os.system", "subprocess"):
            yield Payload(reader, f"pickle {kind} as {name}", _only_a_pickle(name, kind))
    for name, value in {
        "text": "x",
        "control characters": ESCAPE,
        "negative": -1,
        "10^30": 10**30,
        "deep list": "RAW" + "[" * 900 + "]" * 900,
        "10^6 ends": "RAW" + json.dumps([1] * 10**6),
    }.items():
        make = fields("hf/generation_config.json", eos_token_id=value)
        yield Payload(reader, f"generation eos: {name}", make, harmless=True)


def _in_tokenizer(edit: Callable[[dict[str, Any]], object]) -> Make:
    return edited("tok/tokenizer.json", edit)


def _split(pattern: str) -> Callable[[dict[str, Any]], object]:
    """Return a function that puts a regular expression before the tokenizer's own splits."""

    def edit(value: dict[str, Any]) -> None:
        part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        parts = [{**part, "invert": False}, value["pre_tokenizer"]]
        value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}

    return edit


def _replaces(count: int) -> Callable[[dict[str, Any]], object]:
    """Return a function that doubles each letter e ``count`` times."""

    def edit(value: dict[str, Any]) -> None:
        part = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
        value["normalizer"] = {"type": "Sequence", "normalizers": [part] * count}

    return edit


def _token(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: value["added_tokens"][0].update(changes)


TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "exponential regex": _split("(e+)+x$|((l|l)*)*y"),
    "look-around regex": _split("(?<=(a*)*)b(?=((c+)+)+d)"),
    "unfinished regex": _split("(["),
    "regex of 1 MB": _split("(" * 500_000 + ")" * 500_000),
    "text doubled 40 times": _replaces(40),
    "text doubled 20 times": _replaces(20),
    "negative id": _token(id=-1),
    "id 2^32": _token(id=2**32),
    "id 2^31": _token(id=2**31),
    "id text": _token(id="1"),
    "empty token": _token(content=""),
    "token with control characters": _token(content=ESCAPE),
    "token of 10 MB": _token(content="x" * 10_000_000),
    "model unknown": lambda value: value["model"].update(type=f"X{ESCAPE}"),
    "model list": lambda value: value.update(model=[1]),
    "vocabulary negative": lambda value: value["model"]["vocab"].update(a=-5),
    "vocabulary 2^40": lambda value: value["model"]["vocab"].update(a=2**40),
    "merges of unknown": lambda value: value["model"].update(merges=[["zz", "yy"]]),
    "decoder unknown": lambda value: value.update(decoder={"type": "X"}),
    "10^5 added tokens": lambda value: value.update(
        added_tokens=value["added_tokens"]
        + [{**value["added_tokens"][0], "id": 500 + n, "content": f"<{n}>"} for n in range(10**5)]
    ),
}


def _only_eos(value: Any) -> Make:
    """Return a function that sets the end of a document, which no other file then names."""

    def make(folder: Path, canary: Canary) -> None:
        (folder / "tok/special_tokens_map.json").unlink()
        fields("tok/tokenizer_config.json", eos_token=value)(folder, canary)

    return make


def _template_in_config(name: str) -> Make:
    return lambda folder, canary: fields(
        "tok/tokenizer_config.json", chat_template=templates(canary)[name]
    )(folder, canary)


def _template_file(path: str, name: str) -> Make:
    return lambda folder, canary: (folder / path).write_text(templates(canary)[name])


def _tokenizers() -> Iterator[Payload]:
    reader, config = "tokenizer", "tok/tokenizer_config.json"
    for name, edit in TOKENIZERS.items():
        # Several of them are valid: the text is cut in another way, or a token is never used.
        yield Payload(reader, f"tokenizer.json: {name}", _in_tokenizer(edit), harmless=True)
    for name in templates(Canary(Path(), Path(), "")):
        yield Payload(reader, f"chat_template: {name}", _template_in_config(name))
        yield Payload("template", name, _template_file("template.jinja", name))
    for name in ("globals of cycler", "builtins", "endless loop", "huge text"):
        yield Payload(
            reader, f"chat_template.jinja: {name}", _template_file("tok/chat_template.jinja", name)
        )
    for kind, place in SPECIAL.items():
        yield Payload(
            reader, f"{kind} as chat_template.jinja", replaced("tok/chat_template.jinja", place)
        )
    yield Payload(
        reader,
        "remote code",
        fields(config, auto_map={"AutoTokenizer": ["a.B", None]}),
        harmless=True,
    )
    for name, value in {
        "object": {"content": {"a": 1}},
        "control characters": ESCAPE,
        "number": 5,
        "10 MB": "x" * 10_000_000,
        "NUL": "\0",
    }.items():
        # A text that is no token yet becomes a new token, as in transformers.
        new = isinstance(value, str)
        yield Payload(reader, f"eos_token: {name}", _only_eos(value), harmless=new)
    for name, value in {
        "negative": {"-1": {"content": "<a>"}},
        "2^40": {str(2**40): {"content": "<a>"}},
        "text": {ESCAPE: {"content": "<a>"}},
        "list": [1],
        "deep content": {"9": {"content": [[[]]]}},
    }.items():
        yield Payload(
            reader, f"added_tokens_decoder: {name}", fields(config, added_tokens_decoder=value)
        )
    for name, content in {"not UTF-8": b"\xff\xfe", "pickle": pickle.dumps({"a": 1})}.items():
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            yield Payload(reader, f"{name}: {file}", write(f"tok/{file}", content))
    reader = "vocabulary and merges"
    for name, entry in {
        "negative": -1,
        "2^40": 2**40,
        "text": "a",
        "same": 0,
        "float": 1.5,
    }.items():
        make = edited("vocab.json", lambda value, entry=entry: value.update({"zz": entry}))
        yield Payload(reader, f"vocab: {name}", make)
    for name, content in {
        "binary": b"\0\xff" * 1000,
        "unknown pieces": b"#version: 0.2\nzz yy\n",
        "three words": b"#version: 0.2\na b c\n",
        "control characters": f"#version: 0.2\n{ESCAPE} b\n".encode(),
    }.items():
        yield Payload(reader, f"merges: {name}", write("merges.txt", content))
    for name, content in {
        "negative rank": b"YQ== -1\n",
        "rank 2^70": b"YQ== 1180591620717411303424\n",
        "rank of 10^6 digits": b"YQ== " + b"1" * 10**6 + b"\n",
        "no base64": b"\x1b[31m 0\n",
        "bytes missing": b"YQ== 0\n",
        "pickle": pickle.dumps([1]),
        "JSON ranks of floats": b'[{"rank": 1e999, "token_bytes": "YQ=="}]',
    }.items():
        yield Payload("tiktoken", name, write("vocab.tiktoken", content))
    for name, content in {
        "pickle": pickle.dumps([1]),
        "length 2^63": b"\x0a" + b"\xff" * 9 + b"\x7f",
        "endless varint": b"\xff" * 1000,
        "empty": b"",
        "text": ESCAPE.encode() * 100,
        "deep groups": b"\x0b" * 100_000,
        "one piece": b"\x0a\x08\x0a\x01a\x15\0\0\0\0",
    }.items():
        yield Payload("SentencePiece", name, write("piece.model", content))


# -------------------------------------------------------------------------------------------------
# checkpoints of Megatron

ARGUMENTS: dict[str, dict[str, Any]] = {
    "no layers": {"num_layers": None, "hybrid_layer_pattern": None},
    "10^9 layers": {"hybrid_layer_pattern": None, "num_layers": 10**9},
    "pattern of 10^6 letters": {"hybrid_layer_pattern": "M" * 10**6},
    "infinite layers": {"hybrid_layer_pattern": None, "num_layers": float("inf")},
    "frequency 0": {"hybrid_layer_pattern": None, "num_layers": 2, "moe_layer_freq": 0},
    "frequency of code": {
        "hybrid_layer_pattern": None,
        "num_layers": 2,
        "moe_layer_freq": "__import__('os').system('touch was_run')",
    },
    "base 10^400": {"rotary_base": 10**400},
    "hidden_size text": {"hidden_size": f"16{ESCAPE}"},
    "hidden_size 10^15": {"hidden_size": 10**15},
    "NaN": {"norm_epsilon": float("nan")},
    "experts negative": {"num_experts": -4},
    "experts 10^9": {"num_experts": 10**9},
}


def _arguments(changes: dict[str, Any]) -> Make:
    from support import megatron_checkpoint

    def make(folder: Path, canary: Canary) -> None:
        shutil.rmtree(folder / "megatron")
        args = {**megatron_checkpoint.ARGS, **changes}
        megatron_checkpoint.write(
            folder / "megatron", megatron_checkpoint.tensors(), args, common_file=True
        )

    return make


def _pickle_at(place: str, kind: str) -> Make:
    return lambda folder, canary: damaged_megatron.make_hostile(
        folder / "megatron", place, pickles(canary)[kind]
    )


def _storage(**changes: Any) -> Make:
    """Return a function that changes the place of the first tensor."""

    def make(folder: Path, canary: Canary) -> None:
        path = folder / "megatron" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        place = next(iter(metadata.storage_data.values()))
        for name, value in changes.items():
            setattr(place, name, value)
        path.write_bytes(pickle.dumps(metadata))

    return make


def _megatron() -> Iterator[Payload]:
    reader = "Megatron checkpoint"
    for place in (".metadata", "common.pt", "item"):
        for kind in pickles(Canary(Path("x"), Path(), "")):
            yield Payload(reader, f"pickle {kind} in {place}", _pickle_at(place, kind))
    for name, changes in ARGUMENTS.items():
        yield Payload(reader, f"options: {name}", _arguments(changes))
    for name, changes in {
        "file outside": {"relative_path": "../outside/x.distcp"},
        "absolute file": {"relative_path": "/etc/passwd"},
        "device": {"relative_path": "/dev/zero"},
        "name with control characters": {"relative_path": f"{ESCAPE}.distcp"},
        "offset negative": {"offset": -1},
        "offset 2^70": {"offset": 2**70},
        "length 2^62": {"length": 2**62},
        "length text": {"length": "5"},
    }.items():
        yield Payload(reader, f"storage: {name}", _storage(**changes))
    bomb = b"]" + b"2" * 0 + b"(" + b"]" * 50_000_000 + b"l."
    yield Payload(reader, "pickle of 50 million lists", write("megatron/.metadata", bomb))
    memo = pickle.dumps(list(range(10)))[:-1] + b"(" + b"2" * 10_000_000 + b"l."
    yield Payload(reader, "pickle that doubles its stack", write("megatron/.metadata", memo))
    yield Payload(
        reader, "metadata.json deep", write("megatron/metadata.json", DEEP), harmless=True
    )


# -------------------------------------------------------------------------------------------------
# data


def _unusable(line: str) -> Make:
    """Return a function that adds a line which is more than 1 % of the data."""
    return appended("chat.jsonl", line)


def _state(**changes: Any) -> Make:
    return fields("dataset/state.json", **changes)


def _patched(name: str, at: int, data: bytes) -> Make:
    """Return a function that overwrites bytes of a file; a negative place counts from its end."""

    def make(folder: Path, canary: Canary) -> None:
        content = bytearray((folder / name).read_bytes())
        start = at % len(content)
        content[start : start + len(data)] = data
        (folder / name).write_bytes(content)

    return make


def _without_checksums(make: Make) -> Make:
    def both(folder: Path, canary: Canary) -> None:
        (folder / "indexed_text_document.crc32c").unlink()
        make(folder, canary)

    return both


def _arrow_extension(folder: Path, canary: Canary) -> None:
    """Write the extension type whose metadata pyarrow below 14.0.1 reads with pickle."""
    import pyarrow as pa

    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickles(canary)["os.system"],
    }
    schema = pa.schema([pa.field("text", pa.string(), metadata=metadata)])
    with pa.ipc.new_stream(str(folder / "dataset" / "data.arrow"), schema) as out:
        out.write_table(pa.table({"text": pa.array(["a"] * 40)}, schema=schema))


def _loading_script(folder: Path, canary: Canary) -> None:
    for name in ("dataset.py", "chat.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        (folder / "chat" / name).write_text(f"open({str(canary.file)!r}, 'w')\n")
    (folder / "chat" / "data.pkl").write_bytes(pickles(canary)["os.system"])


def _hostile_name(name: str) -> Make:
    return lambda folder, canary: (folder / "chat/a.jsonl").rename(folder / "chat" / name)


LINES = {
    "deep": DEEP,
    "deep message": '{"messages": [{"role": "user", "content": ' + DEEP + "}]}",
    "number of 10^6 digits": '{"messages": [{"role": "user", "content": ' + "1" * 10**6 + "}]}",
    "half of a surrogate pair": '{"messages": [{"role": "user", "content": "\\ud800"}, '
    '{"role": "assistant", "content": "\\ud800"}]}',
    "role with control characters": '{"messages": [{"role": "\\u001b[31m", "content": "a"}]}',
    "NaN": '{"messages": NaN}',
    "a key twice": '{"messages": [], "messages": []}',
    "text of Python": "__import__('os').system('touch was_run')",
    "NUL": "\0" * 100,
    "a field of 10 MB": '{"messages": [{"role": "' + "x" * 10_000_000 + '", "content": "a"}]}',
    "messages object": '{"messages": {"role": "user"}}',
    "10^6 messages": '{"messages": [' + ",".join(["{}"] * 10**6) + "]}",
}


def _data() -> Iterator[Payload]:
    for name, line in LINES.items():
        yield Payload("JSON lines", name, _unusable(line))
    for name, make_bomb in {kind: partial(_bomb, kind=kind) for kind in BOMBS}.items():
        yield Payload("JSON lines", f"bomb: {name}", make_bomb)
    for kind in ("os.system", "eval"):
        make = partial(_pickle_file, name="chat.jsonl", kind=kind)
        yield Payload("JSON lines", f"pickle {kind}", make)
        yield Payload(
            "Parquet", f"pickle {kind}", partial(_pickle_file, name="text.parquet", kind=kind)
        )
        yield Payload(
            "saved data set",
            f"pickle {kind}",
            partial(_pickle_file, name="dataset/data.arrow", kind=kind),
        )
    yield Payload("folder of data", "loading script and pickle", _loading_script, harmless=True)
    for name in (
        f"{ESCAPE}a.jsonl",
        "a\nb.jsonl",
        "-a.jsonl",
        "a\udcff.jsonl",
        "~a.jsonl",
        "$(id).jsonl",
    ):
        yield Payload("folder of data", f"name {name!r}", _hostile_name(name), harmless=True)
    yield Payload(
        "folder of data",
        "link to a parent",
        lambda folder, _: (folder / "chat/up").symlink_to(".."),
        harmless=True,
    )
    for name, make in {
        "footer 2^31": _patched("text.parquet", -8, b"\xff\xff\xff\x7f"),
        "footer 0": _patched("text.parquet", -8, b"\0\0\0\0"),
        "damaged footer": _patched("text.parquet", -200, b"\xff" * 150),
        "damaged pages": _patched("text.parquet", 4, b"\xff" * 200),
        "magic alone": write("text.parquet", b"PAR1"),
        "magic twice": write("text.parquet", b"PAR1PAR1"),
        "deep thrift": write(
            "text.parquet", b"PAR1" + b"\x1c" * 100_000 + struct.pack("<I", 100_000) + b"PAR1"
        ),
    }.items():
        yield Payload("Parquet", name, make)
    for name, make in {
        "file outside": _state(_data_files=[{"filename": "../outside/data.arrow"}]),
        "absolute file": _state(_data_files=[{"filename": "/etc/passwd"}]),
        "no name": _state(_data_files=[{}]),
        "name with control characters": _state(_data_files=[{"filename": f"{ESCAPE}.arrow"}]),
        "name of a directory": _state(_data_files=[{"filename": ".."}]),
        "name NUL": _state(_data_files=[{"filename": "a\0b"}]),
        "files text": _state(_data_files="data.arrow"),
        "length 2^31 of a message": _patched("dataset/data.arrow", 4, b"\xff\xff\xff\x7f"),
        "length negative of a message": _patched("dataset/data.arrow", 4, b"\xf0\xff\xff\xff"),
        "damaged schema": _patched("dataset/data.arrow", 8, b"\xff" * 64),
        "damaged data": _patched("dataset/data.arrow", -400, b"\xff" * 300),
    }.items():
        yield Payload("saved data set", name, make)
    yield Payload("saved data set", "extension type with a pickle", _arrow_extension, harmless=True)
    index = "indexed_text_document.idx"
    for name, make in {
        "magic": _patched(index, 0, b"\0"),
        "version": _patched(index, 9, b"\x02"),
        "type code 6": _patched(index, 17, b"\x06"),
        "type code 200": _patched(index, 17, b"\xc8"),
        "2^62 sequences": _patched(index, 18, struct.pack("<Q", 2**62)),
        "2^64 - 1 documents": _patched(index, 26, struct.pack("<Q", 2**64 - 1)),
        "length negative": _patched(index, 34, struct.pack("<i", -5)),
        "length 2^31 - 1": _patched(index, 34, struct.pack("<i", 2**31 - 1)),
        "start negative": _patched(index, 34 + 4 * 40, struct.pack("<q", -8)),
        "document negative": _patched(index, -8, struct.pack("<q", -1)),
        "token outside": _patched("indexed_text_document.bin", 0, b"\xff\x7f"),
        "cut": lambda folder, _: os.truncate(folder / index, 40),
        "odd bytes": lambda folder, _: os.truncate(folder / "indexed_text_document.bin", 7),
        "pickle": write(index, pickle.dumps([1])),
    }.items():
        yield Payload("indexed data", f"{name}, with checksums", make)
        yield Payload("indexed data", f"{name}, without checksums", _without_checksums(make))
    for name, line in LINES.items():
        # Each line of a file that does not begin as JSON is a text.
        text = not line.startswith(("{", "["))
        yield Payload("prompts", name, appended("prompts.jsonl", line), harmless=text)
    yield Payload("prompts", "bomb", partial(_bomb, kind="gzip", name="prompts.jsonl"))
    yield Payload(
        "prompts", "10^6 prompts", write("prompts.jsonl", '{"prompt": "a"}\n' * (10**6 + 1))
    )
    yield Payload(
        "prompts",
        "control characters",
        write("prompts.jsonl", ESCAPE + "\n" + ESCAPE),
        harmless=True,
    )


def _bomb(folder: Path, canary: Canary, kind: str, name: str = "chat.jsonl") -> None:
    (folder / name).write_bytes(BOMBS[kind]())


def _pickle_file(folder: Path, canary: Canary, name: str, kind: str) -> None:
    (folder / name).write_bytes(pickles(canary)[kind])


# -------------------------------------------------------------------------------------------------
# options, checkpoints, logs


def _yaml(name: str, text: str) -> Make:
    return lambda folder, canary: (folder / name).write_text(
        text.replace("COMMAND_FILE", str(canary.file))
    )


SCRIPTS = {
    "substitution": "X=$(touch COMMAND_FILE)\ntorchrun pretrain_gpt.py --num-layers $X\n",
    "backquotes": "X=`touch COMMAND_FILE`\ntorchrun pretrain_gpt.py --num-layers $X\n",
    "second command": "torchrun pretrain_gpt.py --num-layers 2; touch COMMAND_FILE\n",
    "eval": "eval 'touch COMMAND_FILE'\ntorchrun pretrain_gpt.py --num-layers 2\n",
    "variable of itself": 'X="$X $X"\n' * 40 + 'torchrun pretrain_gpt.py --num-layers "$X"\n',
    "doubled variables": "A0=aaaaaaaaaa\n"
    + "".join(f'A{n + 1}="$A{n}$A{n}"\n' for n in range(40))
    + "torchrun pretrain_gpt.py --num-layers $A40\n",
    "array": "A=(x)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40 + 'torchrun pretrain_gpt.py "${A[@]}"\n',
    "control characters": f"torchrun pretrain_gpt.py --num-layers {ESCAPE}\n",
    "unfinished quote": "torchrun pretrain_gpt.py --num-layers '2\n",
    "NUL": "torchrun\0pretrain_gpt.py --num-layers 2\n",
    "deep braces": "torchrun pretrain_gpt.py --num-layers " + "${A:-" * 500 + "}" * 500 + "\n",
}


def _options() -> Iterator[Payload]:
    for name, text in YAML.items():
        yield Payload("options in YAML", name, _yaml("run.yaml", text))
        yield Payload("Megatron YAML", name, _yaml("model_config.yaml", text))
    for name, text in SCRIPTS.items():
        # The command never runs a script, so it may translate what is left of it.
        make = _yaml("train.sh", text)
        yield Payload("Megatron script", name, make, harmless=True)
    for name, text in {
        "itself": "@run.args\n",
        "control characters": f"--sft{ESCAPE} 1\n",
        "substitution": "--seq-length $(touch was_run)\n",
        "unfinished quote": "--seq-length '128\n",
        "NUL": "--seq-length 128\0\n",
        "a number of 10^5 digits": "--seq-length 1" + "0" * 10**5 + "\n",
        "10^5 flags": "--sft\n" * 10**5,
        "pickle": "cos\nsystem\n(S'touch was_run'\ntR.",
    }.items():
        yield Payload("file of flags", name, write("run.args", text))
    for name, text in {
        "1e999": "1e999 chat.jsonl",
        "NaN": "nan chat.jsonl 1 chat.jsonl",
        "negative": "-1 chat.jsonl 2 chat.jsonl",
        "parent": "1 ../outside/secret.txt",
        "device": "1 /dev/zero",
        "control characters": f"1 {ESCAPE}.jsonl",
        "10^5 words": "1 chat.jsonl " * 10**5,
        "NUL": "1 chat\0.jsonl",
        "odd words": "1 chat.jsonl 2",
    }.items():
        yield Payload("words of data", name, write("blend.txt", text))
        value = json.dumps({"train": text.split(" ")[:200_000]})
        yield Payload("data of splits", name, write("splits.json", value))
    for name, text in {
        "negative": "-5\n",
        "10^18 documents": "1 999999999999999999\n",
        "a number of 10^5 digits": "1" * 10**5 + "\n",
        "binary": "\0\x1b\n",
        "text": f"a\n{ESCAPE}\n",
        "lines without numbers": "#\n" * 10,
        "one line of 100 MB": "1" * 100_000_000,
    }.items():
        yield Payload("lengths", name, write("lengths.txt", text))
    for name, changes in {
        "NaN": {"update_ms": "RAWNaN"},
        "Infinity": {"update_ms": "RAWInfinity"},
        "text": {"update_ms": "1"},
        "null": {"packs": None},
        "10^400": {"tokens": "RAW1" + "0" * 400},
        "packs of numbers": {"packs": [1]},
        "negative capacity": {
            "packs": [{"capacity": -2, "documents": 1, "squares": 1.0, "ms": 1.0}]
        },
        "NaN time": {
            "packs": "RAW" + '[{"capacity": 2, "documents": 1, "squares": 1.0, "ms": NaN}]'
        },
        "text capacity": {"packs": [{"capacity": "2", "documents": 1, "squares": 1.0, "ms": 1.0}]},
        "format list": {"format": []},
        "unknown field": {ESCAPE: 1},
    }.items():
        yield Payload("costs", name, fields("costs.json", **changes))


MANIFEST = "ck/step_00000002/manifest.json"


def _sealed(edit: Callable[[Any], object]) -> Make:
    """Return a function that changes a manifest and computes its checksum again."""
    from megatron_packed.checkpoint.sealed_json import seal

    def make(folder: Path, canary: Canary) -> None:
        value = json.loads((folder / MANIFEST).read_text())
        del value["sha256"]
        edit(value)
        (folder / MANIFEST).write_bytes(seal(value))

    return make


def _tensor(**changes: Any) -> Callable[[Any], object]:
    return lambda value: next(iter(value["tensors"].values())).update(changes)


def _config(section: str, **changes: Any) -> Callable[[Any], object]:
    return lambda value: value["metadata"]["config"][section].update(changes)


EDITS: dict[str, Callable[[Any], object]] = {
    "file outside": lambda value: value["files"][0].update(name="../../outside/x"),
    "absolute file": lambda value: value["files"][0].update(name="/dev/zero"),
    "size 2^62": lambda value: value["files"][0].update(size=2**62),
    "size negative": lambda value: value["files"][0].update(size=-1),
    "header of 2^40 bytes": lambda value: value["files"][0].update(header_bytes=2**40),
    "block of a byte": lambda value: value["files"][0].update(block_bytes=1),
    "unknown checksum": lambda value: value["files"][0].update(algorithm=ESCAPE),
    "no files": lambda value: value.update(files=[]),
    "files object": lambda value: value.update(files={}),
    "world_size 10^12": lambda value: value.update(world_size=10**12),
    "step text": lambda value: value.update(step="2"),
    "step 10^30": lambda value: value.update(step=10**30),
    "another step": lambda value: value.update(step=3),
    "run_id list": lambda value: value.update(run_id=[1]),
    "tensors list": lambda value: value.update(tensors=[]),
    "shape 2^60": _tensor(shape=[2**60]),
    "shape negative": _tensor(shape=[-1, 4]),
    "shape text": _tensor(shape="4"),
    "dtype unknown": _tensor(dtype=ESCAPE),
    "no ranges": _tensor(ranges=[]),
    "attached outside": lambda value: value["attached"][0].update(name="../../../outside/x"),
    "attached twice": lambda value: value["attached"].append(value["attached"][0]),
    "config list": lambda value: value["metadata"].update(config=[1]),
    "no config": lambda value: value["metadata"].pop("config"),
    "10^9 layers": _config("model", hybrid_layer_pattern="*" * 10**7),
    "hidden_size 10^12": _config("model", hidden_size=10**12),
    "hidden_size text": _config("model", hidden_size=ESCAPE),
    "pattern object": _config("model", hybrid_layer_pattern={"a": 1}),
    "metadata deep": lambda value: value["metadata"].update(more=json.loads("[" * 900 + "]" * 900)),
}


def _attached_template(folder: Path, canary: Canary) -> None:
    """Replace the attached template with a hostile one, and give the manifest its checksum."""
    from megatron_packed.checkpoint.manifest import AttachedFile

    path = folder / "ck/step_00000002/template.jinja"
    path.write_text(templates(canary)["globals of cycler"])
    new = AttachedFile.from_bytes(path.name, path.read_bytes()).to_json()
    _sealed(lambda manifest: manifest["attached"][0].update(new))(folder, canary)


def _checkpoints() -> Iterator[Payload]:
    reader = "own checkpoint"
    for name, edit in EDITS.items():
        # Metadata without a meaning here is passed over, as that of a later version must be.
        harmless = name == "metadata deep"
        yield Payload(reader, f"sealed manifest: {name}", _sealed(edit), harmless)
    yield Payload(reader, "attached template", _attached_template)
    for name, content in {
        "outside": b"../outside",
        "pickle": pickle.dumps([1]),
        "control characters": ESCAPE.encode(),
        "deep": DEEP.encode(),
    }.items():
        yield Payload(reader, f"latest: {name}", write("ck/latest", content), harmless=True)
    yield Payload(
        reader,
        "pickle as a rank's file",
        partial(_pickle_file, name="ck/step_00000002/rank_00000.safetensors", kind="os.system"),
    )
    yield Payload(reader, "STATUS.json deep", write("ck/STATUS.json", DEEP), harmless=True)


RECORDS = {
    "deep": DEEP,
    "iteration text": '{"iteration": "1", "lm_loss": 1.0}',
    "iteration 10^400": '{"iteration": 1' + "0" * 400 + ', "lm_loss": 1.0}',
    "iteration of 10^6 digits": '{"iteration": ' + "1" * 10**6 + "}",
    "iteration negative": '{"iteration": -1, "lm_loss": 1.0}',
    "iteration NaN": '{"iteration": NaN, "lm_loss": 1.0}',
    "iteration list": '{"iteration": [1]}',
    "loss text": '{"iteration": 3, "lm_loss": "<script>alert(1)</script>"}',
    "loss list": '{"iteration": 3, "lm_loss": [[1]]}',
    "loss 1e999": '{"iteration": 3, "lm_loss": 1e999}',
    "loss 10^400": '{"iteration": 3, "lm_loss": 1' + "0" * 400 + "}",
    "starts number": '{"iteration": 1, "starts": 5}',
    "run list": '{"run": [1], "iteration": 1}',
    "run with a script": '{"run": "<script>alert(1)</script>\\u001b[31m"}',
    "expert_load deep": '{"iteration": 3, "expert_load": ' + "[" * 500 + "]" * 500 + "}",
    "samples number": '{"iteration": 2, "samples": 5}',
    "samples of objects": '{"iteration": 2, "samples": [{"prompt": 1, "answer": []}]}',
    "checkpoint number": '{"iteration": 2, "checkpoint": 5}',
    "end list": '{"end": [1]}',
    "null": "null",
    "list": "[1]",
    "control characters": ESCAPE,
    "not JSON": "{",
}


def _line(folder: Path, canary: Canary, line: str) -> None:
    """Put a line after those of a log; a record of a step gets the other fields of the last step."""
    path = folder / "log.jsonl"
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and "iteration" in record:
            steps = [json.loads(one) for one in path.read_text().splitlines() if "lm_loss" in one]
            line = json.dumps({**steps[-1], **record})
    with path.open("a") as file:
        file.write(line + "\n")


def _step(**changes: Any) -> Make:
    """Return a function that changes the fields of all steps of a log."""

    def make(folder: Path, canary: Canary) -> None:
        path = folder / "log.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record.update({k: v for k, v in changes.items() if k in record})
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return make


def _logs() -> Iterator[Payload]:
    for reader in ("log in a report", "log in a plot", "log of a run"):
        for name, line in RECORDS.items():
            # A reader passes over lines that a killed run has cut.
            yield Payload(reader, f"line: {name}", partial(_line, line=line), harmless=True)
    for value in (ESCAPE, [1], {"a": {}}, True, 10**400, "<script>"):
        for field in ("lm_loss", "learning_rate", "kernels", "step_time_ms", "run"):
            shown = str(value)[:10].encode("unicode_escape").decode()
            make = _step(**{field: value})
            yield Payload("log in a report", f"all {field} are {shown}", make, harmless=True)
