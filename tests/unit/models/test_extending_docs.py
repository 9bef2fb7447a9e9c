"""The guide to adding a layer kind: its mixer works, and the names in its tables exist."""

import re
from pathlib import Path

import torch

from megatron_packed.layers.build import Build
from support import hybrid_cases as cases

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "extending.md"
LENGTHS = [5, 1, 9, 2]


def shift_mixer():
    """Return the class of the page, whose record names it."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["MIXER"].kind.symbol == "S"
    return names["ShiftMixer"]


def model_with(mixer):
    """Return a tiny model with two MLP layers whose second mixer is replaced."""
    model = cases.tiny_model("--")
    build = Build(backends=model.backends, device="cpu", dtype=torch.float32)
    shift = mixer(model.config, build)
    with torch.no_grad():
        for parameter in shift.parameters():
            parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(3))
    model.layers[1].mixer = shift
    return model


def test_the_mixer_of_the_page_keeps_documents_apart():
    """A pack gives the losses and gradients of its documents one by one."""
    model = model_with(shift_mixer())
    documents = cases.make_documents(LENGTHS)
    packed = cases.run_packed(model, documents, tail=6, spare=2)
    assert cases.beyond_rounding(packed, cases.run_alone(model, documents), 1e-5) == {}


def test_the_mixer_of_the_page_reads_the_previous_token():
    """The first token of a document changes the output of the second token."""
    model = model_with(shift_mixer())
    [(tokens, mask)] = cases.make_documents([4])
    changed = tokens.copy()
    changed[0] = (changed[0] + 1) % cases.VOCAB
    first, second = (cases.run_packed(model, [(t, mask)])[0] for t in (tokens, changed))
    assert not torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])


def test_names_in_the_tables_exist():
    """Each row of a table names a file and names that the file contains."""
    rows = re.findall(r"^\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    found = 0
    for row in rows:
        paths = re.findall(r"`([\w/]+\.py)`", row)
        files = [
            path
            for name in paths
            for path in (ROOT / name, ROOT / "megatron_packed" / name)
            if path.is_file()
        ]
        names = re.findall(r"`([A-Za-z_]+)`", row)
        text = "".join(path.read_text() for path in files)
        missing = [name for name in names if files and name not in text and name != "plan"]
        assert missing == [], row
        found += len(names)
    assert found > 12
