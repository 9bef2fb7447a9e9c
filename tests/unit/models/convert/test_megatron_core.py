"""A checkpoint that megatron-core 0.19.2 wrote with TP 2: its logits, and its next losses.

``tools/megatron_fixture.py`` writes the files of this test.
"""

import json
import shlex
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.models.convert.import_huggingface import Imported
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.training.from_python import train
from support import hybrid_cases as cases
from support.json_lines import write_texts

FOLDER = Path(__file__).with_name("megatron_core")
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
ROWS = 128
TOLERANCE = 1e-4


@pytest.fixture(scope="module", name="done")
def _done(tmp_path_factory) -> Imported:
    folder = tmp_path_factory.mktemp("megatron_core")
    with tarfile.open(FOLDER / "checkpoint.tar.xz") as archive:
        # Python before 3.10.12 and 3.11.4 has no filters.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder / "theirs", **safe)
    return from_megatron(folder / "theirs", folder / "ours")


def test_logits_are_those_of_megatron_core(done):
    model = HybridModel(done.model, vocab_size=ROWS, max_positions=64, dtype=torch.float32)
    manifest = read_manifest(done.saved.path)
    model.load_state_dict(
        {
            name.removeprefix("model/"): read_tensor(done.saved.path, name, manifest)
            for name in manifest.tensors
            if name.startswith("model/")
        }
    )
    tokens = np.array(EXPECTED["tokens"])
    batch = cases.make_pack([(tokens, np.ones(len(tokens), bool))])
    with torch.no_grad():
        found = model.logits(batch.tokens, batch.packed)[: len(tokens) : 8, :ROWS]
    expected = torch.tensor(EXPECTED["logits"])
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def test_the_next_losses_are_those_of_megatron_core(done, tmp_path):
    documents = EXPECTED["documents"]
    data = tmp_path / "documents.jsonl"
    # The end of a document is added, and the next token of each other token is a target.
    rows = (" ".join(map(str, document[:-1])) for document in documents)
    write_texts(data, rows)
    root = done.saved.path.parent
    lines = [shlex.split(line) for line in (root / "model.args").read_text().splitlines()]
    flags = {
        "--tokenizer-type": "NullTokenizer",
        "--train-data-path": data,
        "--seq-length": len(documents[0]),
        "--global-batch-size": len(documents),
        "--micro-batch-size": 1,
        "--train-iters": 6,
        "--lr": 1,
        "--adam-beta2": 0.95,
        "--load": root,
        "--device": "cpu",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    words += ["--use-checkpoint-opt_param-scheduler", "--no-isolation-self-test"]
    seen = []
    model = [word for line in lines for word in line]
    assert train([*model, *words], seen.append) is ExitCode.DONE
    assert [record["iteration"] for record in seen] == [4, 5, 6]
    found = [record["lm_loss"] for record in seen]
    assert found == pytest.approx(EXPECTED["losses"], rel=TOLERANCE)
