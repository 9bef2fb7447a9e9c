"""Every example of ``docs/python.md`` runs and gives the results that the page describes."""

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_packed
from support.stand_in import RecordingBackend

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
EXAMPLES = {
    section.splitlines()[0]: re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for section in SECTIONS
}
[DATA] = EXAMPLES.pop("# Use it from Python")
GRAPHS = "CUDA graphs around your own module"
OWN_LOSS = "Your own loss"
CALLBACKS = "Callbacks of the training loop"


def run(code: str, name: str = "__main__") -> dict:
    """Run an example as a script, and return its names."""
    names = {"__name__": name}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of a reader who has written the files of the page."""
    monkeypatch.chdir(tmp_path)
    run(DATA)
    return tmp_path


def test_every_example_has_a_test():
    """The sections of the page contain exactly the examples that the tests below run."""
    assert {title: len(found) for title, found in EXAMPLES.items()} == {
        "Packs for your own trainer": 3,
        "Packs of lengths alone": 1,
        "Packs in other models": 2,
        "The model with any optimizer": 1,
        GRAPHS: 1,
        OWN_LOSS: 1,
        "Offload around your own module": 1,
        "A whole run with a callback": 1,
        CALLBACKS: 2,
        "Text from a checkpoint": 1,
    }


def test_names_of_the_page_are_those_of_the_package():
    """The table of the page lists exactly the public names of the package."""
    table = PAGE.read_text().partition("| I want |")[2].partition("\n\n")[0]
    named = {word.partition(".")[0] for word in re.findall(r"`([A-Za-z_.]+)`", table)}
    assert named == {*megatron_packed.__all__} - {"__version__"}


def test_packs_are_printed(folder, capsys):
    """The loop prints every pack of two epochs, and the number of documents used."""
    dataset = run(EXAMPLES["Packs for your own trainer"][0])["dataset"]
    printed = capsys.readouterr().out
    counts = re.findall(r"^(\d+) documents, \d+ targets$", printed, re.MULTILINE)
    assert len(counts) == 2 * len(dataset) and sum(map(int, counts)) == 2 * 400
    assert "400 lines in 1 file: 400 used" in printed and dataset.max_documents == 16


def test_records_are_packed(folder, capsys):
    """Every kind of record gives packs, and the strings are the same documents as the texts."""
    datasets = run(EXAMPLES["Packs for your own trainer"][1])["datasets"]
    assert re.findall(r"^(.+) \d+ packs$", capsys.readouterr().out, re.MULTILINE) == [*datasets]
    used = {
        name: sum(pack.packed.num_seqs for pack in dataset) for name, dataset in datasets.items()
    }
    counts = {"chats": 20, "texts": 2, "strings": 2, "token ids": 2, "labelled": 1, "stream": 1000}
    assert used == counts
    texts, strings = (next(iter(datasets[name])).tokens for name in ("texts", "strings"))
    assert torch.equal(texts, strings)
    assert (folder / "cache").is_dir()


def test_lengths_are_packed(capsys):
    """Each epoch prints packs that contain every document once, and no overfull pack."""
    run(EXAMPLES["Packs of lengths alone"][0])
    lines = re.findall(r"^\[([\d, ]+)\] (\d+) tokens$", capsys.readouterr().out, re.MULTILINE)
    numbers = [number for documents, _ in lines for number in map(int, documents.split(", "))]
    assert sorted(numbers) == sorted([0, 1, 2, 3, 4] * 2)
    assert [int(tokens) for _, tokens in lines] == [1024] * 4


def test_a_loader_resumes(folder, capsys):
    """A resumed loader continues with the rest of the epoch and then the next epoch."""
    resumed = run(EXAMPLES["Packs for your own trainer"][2])["resumed"]
    epochs = [line[0] for line in capsys.readouterr().out.splitlines() if " MicroBatch(" in line]
    assert epochs.count("1") == len(resumed) == epochs.count("0") + 3


def varlen_reference(q_TNH, k_TNH, v_TNH, offsets, offsets_kv, longest, longest_kv, *, causal):
    """Compute what flash-attn computes, document by document."""
    assert causal and offsets is offsets_kv and longest == longest_kv == offsets.diff().max()
    output = torch.empty_like(q_TNH)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        of_document = (x[start:end].transpose(0, 1).float() for x in (q_TNH, k_TNH, v_TNH))
        found = torch.nn.functional.scaled_dot_product_attention(*of_document, is_causal=True)
        output[start:end] = found.transpose(0, 1)
    return output


def test_flash_attn_takes_the_offsets(folder, monkeypatch):
    """The example calls flash-attn with valid arguments.

    Without a GPU a reference replaces flash-attn.
    """
    if torch.cuda.is_available():
        pytest.importorskip("flash_attn")
    else:
        stand_in = SimpleNamespace(flash_attn_varlen_func=varlen_reference)
        monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    names = run(EXAMPLES["Packs in other models"][0])
    q, k, v, offsets, longest = (names[name] for name in ("q", "k", "v", "offsets", "longest"))
    expected = varlen_reference(q, k, v, offsets, offsets, longest, longest, causal=True)
    assert torch.allclose(names["output"], expected, atol=2e-2)


def test_a_hugging_face_model_trains(folder):
    """The example trains a Hugging Face model on packs, and the loss is below 5.2."""
    pytest.importorskip("transformers")
    assert 0 < run(EXAMPLES["Packs in other models"][1])["loss"].item() < 5.2


def test_the_model_trains_with_an_optimizer_of_torch(folder):
    """The last loss is below 70 % of the first loss with torch's AdamW."""
    losses = torch.stack(run(EXAMPLES["The model with any optimizer"][0])["losses"]).tolist()
    assert len(losses) > 8 and losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphs_around_a_module_give_its_gradients(device):
    """Replay gives the eager gradients. Without a GPU a stand-in captures."""
    names, backend = run(EXAMPLES[GRAPHS][0], "example"), None
    if device == "cpu":
        backend = RecordingBackend()
        names["LayerGraphs"] = partial(names["LayerGraphs"], backend=backend)
    found = names["gradients"](torch.device(device))
    assert len(found) == 3
    for replayed, eager in found:
        assert eager.abs().max() > 0 and torch.allclose(
            replayed, eager, rtol=1e-5, atol=1e-5 * eager.abs().max()
        )
        assert device == "cuda" or torch.equal(replayed, eager)
    assert not torch.equal(found[0][0], found[1][0])
    if backend is not None:
        # One pack is replayed at the capture size of 16 documents, and two packs at that of 4.
        assert [graph.replays for graph in backend.graphs] == [1] * 5 + [2] * 5
        assert all(graph.gone for graph in backend.graphs)


def test_graphs_are_counted(capsys):
    """On a GPU all three packs are replayed. On a CPU the example prints why no pack is replayed."""
    run(EXAMPLES[GRAPHS][0])
    printed = capsys.readouterr().out
    if torch.cuda.is_available():
        assert "3 micro-batches replayed, 0 run eagerly" in printed
    else:
        reason = "CUDA graphs need a GPU, and the device is cpu"
        assert printed.startswith(f"{reason}: every micro-batch runs eagerly.\n")
        assert f"3 x eager: {reason}" in printed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_model_trains_with_its_own_loss(device, folder):
    """The loss falls, and replays by a stand-in give the losses of eager layers."""
    names, backend = run(EXAMPLES[OWN_LOSS][0], "example"), RecordingBackend()
    losses = names["train_steps"](torch.device(device))
    assert len(losses) > 8 and losses[-1] < 0.8 * losses[0]
    if device == "cpu":
        names["LayerGraphs"] = partial(names["LayerGraphs"], backend=backend)
        assert names["train_steps"](torch.device(device)) == losses
        assert sum(graph.replays for graph in backend.graphs) >= 6 * len(losses)


def test_a_callback_adds_a_metric_and_stops_the_run(folder, capsys):
    """The run stops after the bits of a step fall below the target, and saves."""
    names = run(EXAMPLES[CALLBACKS][0])
    bits = names["callback"].bits
    assert capsys.readouterr().out == f"PREEMPTED {bits}\n" and 4 <= len(bits) < 12
    assert [path.name for path in (folder / "runs" / "bits").glob("step_*")] == [
        f"step_{len(bits):08d}"
    ]


def test_an_average_of_weights_resumes(folder):
    """The average of the resumed run equals that of a run that does not stop."""
    names = run(EXAMPLES[CALLBACKS][1])
    straight = names["WeightAverage"]()
    megatron_packed.train(
        names["model"].split(), callbacks=[straight], train_iters=8, **names["run"]
    )
    resumed, stopped = names["resumed"].average, names["stopped"].average
    assert all(torch.equal(resumed[name], straight.average[name]) for name in resumed)
    assert not torch.equal(resumed["embedding.weight"], stopped["embedding.weight"])


def test_offload_around_a_module_changes_no_gradient(folder, capsys, monkeypatch):
    """The weights after three steps equal those without offload, and offload was active."""
    code = EXAMPLES["Offload around your own module"][0]
    torch.manual_seed(0)
    names = run(code)
    assert "offload: 2 device buffer(s) of" in capsys.readouterr().out
    torch.manual_seed(0)
    plain = run(code.replace("    offload_module(layer, offload)", "    pass"))
    assert names["offload"].off_reason is None
    for found, expected in zip(names["layers"].parameters(), plain["layers"].parameters()):
        assert torch.equal(found, expected)


def test_a_run_is_followed_and_its_model_writes_text(folder, capsys):
    """The callback gets a loss for every iteration, and the saved model generates text."""
    losses = run(EXAMPLES["A whole run with a callback"][0])["losses"]
    assert [*losses] == [*range(1, 13)] and losses[12] < losses[1]
    assert capsys.readouterr().out == f"DONE {losses}\n"
    trained = run(EXAMPLES["Text from a checkpoint"][0])["trained"]
    one = trained.generate("packed documents", 16)
    options = {"temperature": 0.8, "top_p": 0.95}
    two = trained.generate(["packed", "documents"], 16, **options, seed=1)
    assert capsys.readouterr().out == f"{one}\n{two}\n" and len(two) == 2
    assert two != trained.generate(["packed", "documents"], 16, **options, seed=2)
