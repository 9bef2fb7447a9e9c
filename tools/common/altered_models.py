"""Random changes of a Hugging Face folder: values, keys, aliases, names of tensors and files."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed.models.convert.families.registry import FAMILIES

CONFIG = "config.json"
Fields = dict[str, Any]


class Alteration(NamedTuple):
    """Change that was made to a folder."""

    text: str
    named: tuple[str, ...]
    """Words of which a refusal must contain one."""


ALIASES = (
    ("rope_theta", "rope_parameters.rope_theta"),
    ("partial_rotary_factor", "rope_parameters.partial_rotary_factor"),
    ("rope_scaling", "rope_parameters"),
    ("rope_parameters.type", "rope_parameters.rope_type"),
    ("original_max_position_embeddings", "rope_parameters.original_max_position_embeddings"),
    ("num_experts", "num_local_experts"),
    ("num_experts", "n_routed_experts"),
    ("num_local_experts", "n_routed_experts"),
    ("layers_block_type", "layer_types"),
    ("hybrid_override_pattern", "layers_block_type"),
    ("attn_layer_indices", "layer_types"),
    ("attention_head_dim", "head_dim"),
    ("num_query_groups", "num_key_value_heads"),
    ("norm_eps", "layer_norm_epsilon"),
    ("rms_norm_eps", "layer_norm_epsilon"),
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("hidden_activation", "hidden_act"),
    ("mamba_hidden_act", "mlp_hidden_act"),
    ("mamba_n_heads", "mamba_num_heads"),
    ("mamba_d_head", "mamba_head_dim"),
    ("n_groups", "mamba_n_groups"),
    ("num_heads", "num_attention_heads"),
    ("n_head", "num_attention_heads"),
    ("n_embd", "hidden_size"),
    ("d_model", "hidden_size"),
    ("top_k", "num_experts_per_tok"),
    ("moe_topk", "num_experts_per_tok"),
    ("ffn_hidden_size", "intermediate_size"),
    ("max_window_layers", "num_hidden_layers"),
    ("n_layer", "num_hidden_layers"),
    ("expand", "mamba_expand"),
    ("mamba_chunk_size", "chunk_size"),
    ("state_size", "mamba_d_state"),
    ("ssm_state_size", "state_size"),
    ("torch_dtype", "dtype"),
)
"""Two keys of one meaning in some library."""
_LIBRARY = {
    "attn_implementation": "eager",
    "chunk_size_feed_forward": 4,
    "head_dim": None,
    "id2label": {"0": "a"},
    "is_decoder": True,
    "is_encoder_decoder": True,
    "output_hidden_states": True,
    "per_layer_config": {"0": {"rms_norm_eps": 0.5}},
    "return_dict": False,
    "tie_encoder_decoder": True,
    "torchscript": True,
    "use_bfloat16": True,
    "use_cache": False,
}
"""Keys of transformers that any config.json may have."""


def values_of(value: Any, draw: random.Random) -> list[Any]:
    """Return other values for a key: of wrong types, null, negative and huge."""
    others: list[Any] = [
        None,
        "",
        str(value),
        str(value).lower(),
        True,
        False,
        0,
        -1,
        10**12,
        10**30,
    ]
    others += [1e308, math.nan, [], [value], [None], {}, {"a": None}, {"a": value}]
    if isinstance(value, bool):
        return [*others, not value, int(value)]
    if isinstance(value, int | float):
        return [*others, -value, value * 2, value + 1, value // 2, float(value), value + 0.5]
    if isinstance(value, list) and value:
        place = draw.randrange(len(value))
        wrong = draw.choice([None, 1, True, "", "full_attention", "linear_attention", [], -1])
        return [
            *others,
            [*value[:place], wrong, *value[place + 1 :]],
            value[:-1],
            [*value, value[0]],
            value[::-1],
            {str(number): one for number, one in enumerate(value)},
        ]
    if isinstance(value, dict):
        return [*others, {**value, "a": 1}, dict.fromkeys(value), list(value.items())]
    return others


def places_of(fields: Fields, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key, also inside of objects; not the options of vision."""
    for key, value in fields.items():
        if key == "vision_config":
            continue
        yield (*before, key)
        if isinstance(value, dict):
            yield from places_of(value, (*before, key))


def holder(fields: Fields, place: tuple[str, ...]) -> Fields:
    for key in place[:-1]:
        fields = fields[key]
    return fields


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


_OLD_WORDS = {"linear_attention": "mamba", "full_attention": "attention"}


def old_form(fields: Fields) -> None:
    """Write the keys of a config.json as older files of the hub have them."""
    inside = fields.get("text_config", fields)
    rope = inside.get("rope_parameters")
    if rope and rope["rope_theta"] is not None:  # older files write no positions in the same form
        del inside["rope_parameters"]
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope:
                inside[key] = rope.pop(key)
        inside["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    if "dtype" in fields:
        fields["torch_dtype"] = fields.pop("dtype")
    kind = fields["model_type"]
    if kind in ("granitemoehybrid", "bamba"):
        for key in {"layer_types", "layers_block_type"} & fields.keys():
            fields[key] = [_OLD_WORDS[word] for word in fields[key]]
    if kind == "qwen3_moe":
        fields["num_experts"] = fields.pop("num_local_experts")
    if kind == "nemotron_h":
        symbols = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        layers = fields.pop("layers_block_type")
        fields["hybrid_override_pattern"] = "".join(symbols.get(word, word) for word in layers)
        fields["num_hidden_layers"] = len(layers)
        fields["rms_norm_eps"] = fields["norm_eps"] = fields["layer_norm_epsilon"]


def other_value(fields: Fields, draw: random.Random) -> Alteration:
    place = draw.choice(list(places_of(fields)))
    inside = holder(fields, place)
    value = draw.choice(values_of(inside[place[-1]], draw))
    old = inside[place[-1]]
    text = f"{'.'.join(place)} {shown(old)} -> {shown(value)}"
    inside[place[-1]] = value
    # A list or object without some entries is refused for the missing ones.
    return Alteration(text, (*place[-1:], *(old if isinstance(old, dict) else ())))


def null(fields: Fields, draw: random.Random) -> Alteration:
    place = draw.choice(list(places_of(fields)))
    holder(fields, place)[place[-1]] = None
    return Alteration(f"{'.'.join(place)} -> null", place[-1:])


def missing(fields: Fields, draw: random.Random) -> Alteration:
    place = draw.choice(list(places_of(fields)))
    del holder(fields, place)[place[-1]]
    # Without its heads, a model is refused for the tensors that have another shape.
    return Alteration(f"{'.'.join(place)} is missing", place[-1:])


def added(fields: Fields, draw: random.Random) -> Alteration:
    """Add a key that another family or transformers reads."""
    text = fields.get("text_config")
    inside = text if isinstance(text, dict) and draw.random() < 0.5 else fields
    keys = {key for family in FAMILIES.values() for key in family.deciding_keys} | _LIBRARY.keys()
    key = draw.choice(sorted(keys - inside.keys()))
    value = _LIBRARY.get(key, draw.choice([None, 1, 2, 0.5, True, False, "rope", [0], {}]))
    parts = key.split(".")
    for part in parts[:-1]:
        inside = inside.setdefault(part, {})
        if not isinstance(inside, dict):
            return null(fields, draw)
    inside[parts[-1]] = value
    return Alteration(f"{key} {shown(value)} is added", (parts[-1],))


def alias(fields: Fields, draw: random.Random) -> Alteration:
    """Write a key under another name too, or in its place, with the same or another value."""
    text = fields.get("text_config")
    inside = text if isinstance(text, dict) else fields
    flat = {".".join(place): place for place in places_of(inside)}
    pairs = [pair for pair in ALIASES if set(pair) & flat.keys()]
    one, other = draw.choice(pairs)
    if one in flat and (other not in flat or draw.random() < 0.5):
        one, other = other, one
    place = flat[other]
    value = holder(inside, place)[place[-1]]
    kind = draw.choice(["moved", "same", "other", "null"])
    if kind == "moved":
        del holder(inside, place)[place[-1]]
    new = value
    if kind == "other":
        new = draw.choice(values_of(value, draw))
        if isinstance(value, int | float) and not isinstance(value, bool):
            new = value * 2
    if kind == "null":
        new = None
    parts, target = one.split("."), inside
    for part in parts[:-1]:
        target = target.setdefault(part, {})
    target[parts[-1]] = new
    text = f"{one} {shown(new)} beside {other} {shown(value)}" + " (moved)" * (kind == "moved")
    return Alteration(text, (parts[-1], place[-1]))


def old_positions(fields: Fields, draw: random.Random) -> Alteration:
    """Write rotary options as old files have them, with stale or contradictory parts."""
    text = fields.get("text_config")
    inside = text if isinstance(text, dict) else fields
    rope = inside.get("rope_parameters")
    rope = dict(rope) if isinstance(rope, dict) else {"rope_theta": 100.0}
    theta = rope.get("rope_theta")
    scaling = draw.choice(
        [
            None,
            {},
            {"type": "default"},
            {"rope_type": "default", "type": "linear"},
            {"type": "linear", "factor": 2.0},
            {"type": "dynamic", "factor": 2.0},
            {"rope_type": "llama3", "factor": 8.0},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": draw.choice([16, None, "16", -16, 16.5]),
            },
            {"rope_type": None},
            {"rope_theta": 50.0},
            {"full_attention": {"rope_type": "default", "rope_theta": 50.0}},
            {"mrope_section": [1, 1, 2], "rope_type": "mrope"},
            {"mrope_section": [1, 1, 2]},
        ]
    )
    name = draw.choice(["rope_scaling", "rope_parameters"])
    if draw.random() < 0.7 or name == "rope_parameters":
        inside.pop("rope_parameters", None)
    inside[name] = scaling
    if draw.random() < 0.7:
        inside["rope_theta"] = draw.choice([theta, 100.0, 100, None, "100", 0, -5.0, True])
    if draw.random() < 0.2:
        inside["partial_rotary_factor"] = draw.choice([None, 0.5, 1.0, "0.5", 2.0, 0])
    if draw.random() < 0.1:
        inside["original_max_position_embeddings"] = 16
    words = {
        key: inside[key]
        for key in (
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
            "partial_rotary_factor",
            "original_max_position_embeddings",
        )
        if key in inside
    }
    return Alteration(f"positions {json.dumps(words)}", ("rope", "partial_rotary", "position"))


CONFIG_CHANGES: tuple[Callable[[Fields, random.Random], Alteration], ...] = (
    other_value,
    other_value,
    null,
    missing,
    added,
    alias,
    old_positions,
)


def alter_config(folder: Path, draw: random.Random) -> Alteration:
    """Make one change of config.json, or in one of five cases two."""
    path = folder / CONFIG
    fields = json.loads(path.read_text())
    count = 1 if draw.random() < 0.8 else 2
    made = [draw.choice(CONFIG_CHANGES)(fields, draw) for _ in range(count)]
    path.write_text(json.dumps(fields))
    return Alteration(
        "; ".join(one.text for one in made), tuple(word for one in made for word in one.named)
    )


def _text(text: str) -> Callable[[Path, random.Random], Alteration]:
    def write(folder: Path, draw: random.Random) -> Alteration:
        (folder / CONFIG).write_text(text)
        return Alteration(f"{CONFIG} is {text[:40]!r}", (CONFIG,))

    return write


def twice(folder: Path, draw: random.Random) -> Alteration:
    """Write a key of config.json twice."""
    path = folder / CONFIG
    text = path.read_text()
    key = draw.choice(sorted(json.loads(text)))
    path.write_text(text.rstrip().removesuffix("}").rstrip() + f', "{key}": 3}}')
    return Alteration(f"{key} twice", (key,))


def tensor_names(folder: Path, draw: random.Random) -> Alteration:
    """Rename a tensor in the header of a file: remove, double, move or misspell it."""
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = draw.choice(sorted(header.keys() - {"__metadata__"}))
    kind = draw.choice(["renamed", "removed", "dtype", "shape", "offsets", "prefix", "empty"])
    entry = header.pop(name)
    named: tuple[str, ...] = (name, path.name)
    if kind == "renamed":
        header[name.replace("weight", "wieght")] = entry
    elif kind == "prefix":
        header[f"base_model.{name}"] = entry
    elif kind == "dtype":
        header[name] = {**entry, "dtype": draw.choice(["F64", "I8", "F32 ", "BF16", None, 3])}
    elif kind == "shape":
        header[name] = {**entry, "shape": draw.choice([entry["shape"][::-1], [1], [-1], None, []])}
    elif kind == "offsets":
        header[name] = {**entry, "data_offsets": draw.choice([[0, 4], [4, 0], None, [0], "0"])}
    elif kind == "empty":
        header[""] = entry
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return Alteration(f"tensor {name}: {kind}", named)


def index(folder: Path, draw: random.Random) -> Alteration:
    """Change the index, or add an index of other files."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        path.write_text('{"weight_map": {}}')
        return Alteration("an index beside model.safetensors", (path.name,))
    fields = json.loads(path.read_text())
    files = fields["weight_map"]
    name = draw.choice(sorted(files))
    kind = draw.choice(["other file", "missing", "extra", "outside", "null", "list", "no map"])
    if kind == "other file":
        files[name] = draw.choice(sorted(set(files.values())))
    elif kind == "missing":
        del files[name]
    elif kind == "extra":
        files["more.weight"] = files[name]
    elif kind == "outside":
        files[name] = draw.choice(
            ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin"]
        )
    elif kind == "null":
        files[name] = draw.choice([None, 3, [], {}])
    elif kind == "list":
        fields["weight_map"] = list(files)
    else:
        del fields["weight_map"]
    path.write_text(json.dumps(fields))
    return Alteration(f"index: {kind} ({name})", (path.name, name, "weight_map"))


def whole_files(folder: Path, draw: random.Random) -> Alteration:
    """Cut, empty, replace or remove a file of weights."""
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    kind = draw.choice(["cut", "empty", "longer", "bytes", "removed", "a folder", "a long header"])
    if kind == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "longer":
        path.write_bytes(content + b"more")
    elif kind == "bytes":
        path.write_bytes(draw.randbytes(len(content)))
    elif kind == "a long header":
        path.write_bytes(struct.pack("<Q", 1 << draw.choice([31, 40, 63])) + content[8:])
    else:
        path.unlink()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "a folder":
        path.mkdir()
    return Alteration(f"{path.name}: {kind}", (path.name, "safetensors"))


def tokenizer(folder: Path, draw: random.Random) -> Alteration:
    """Add a tokenizer's file that is not one. Weights are converted without it."""
    name = draw.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    text = draw.choice(["", "null", "[]", "{}", '{"model": null}', '{"chat_template": 3}', "\x00"])
    (folder / name).write_text(text)
    return Alteration(f"{name} is {text!r}", (name,))


FILE_CHANGES: tuple[Callable[[Path, random.Random], Alteration], ...] = (
    tensor_names,
    tensor_names,
    index,
    whole_files,
    tokenizer,
    twice,
    _text(""),
    _text("[]"),
    _text("null"),
    _text('{"model_type": ["llama"]}'),
    _text('{"model_type": "llama"}'),
    _text("[" * 100_000),
)


def alter(folder: Path, draw: random.Random) -> Alteration:
    """Make one or two random changes of a folder; four of five change config.json."""
    if draw.random() < 0.8:
        return alter_config(folder, draw)
    return draw.choice(FILE_CHANGES)(folder, draw)
