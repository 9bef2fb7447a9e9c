"""``megatron-packed tune``: its statistics of data, lengths and packs, its recommendation, and the
expected cost.
"""

import json
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

from megatron_packed.cli import measure_capacities as measure
from megatron_packed.cli import tune as tune_command
from megatron_packed.cli.main import main
from megatron_packed.config.parser.parse import parse
from megatron_packed.data.packing.packer import METHODS
from megatron_packed.data.packing.step_cost import StepCosts, Timed
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.inputs.open_documents import open_documents
from megatron_packed.inputs.plan_packs import plan_training
from support import commands
from support.json_lines import write_texts

MODEL = shlex.split("""--hybrid-layer-pattern M* --hidden-size 16 --num-attention-heads 2 --mamba-head-dim 8
    --mamba-num-groups 1 --mamba-state-dim 8 --mamba-chunk-size 16 --disable-bias-linear --device cpu""")
ATTENTION = ["--hybrid-layer-pattern", "*", *MODEL[2:6], "--disable-bias-linear", "--device", "cpu"]
UNUSED = [*MODEL, "--lr", "0", "--train-iters", "9"]


def tune(capsys, *argv):
    return commands.report(capsys, "tune", *argv)


def refusal(capsys, *argv):
    return commands.refusal(capsys, "tune", *argv)


def long_tailed(count, seed=0):
    return np.maximum(
        np.exp(3 + 1.2 * np.random.default_rng(seed).standard_normal(count)), 1
    ).astype(int)


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, long_tailed(3000))))
    return path


def published(path):
    """Write a histogram of documents per pack with P50 12, P90 43, P99 106 and maximum 358; between
    these points it follows a power law.
    """
    exceeded, counts = [1.0, 0.5, 0.1, 0.01, 1e-4], [1, 12, 43, 106, 358]
    points = -np.log(1 - np.arange(10_000) / 10_000)
    packs = np.ceil(np.exp(np.interp(points, -np.log(exceeded), np.log(counts))) - 1e-9).astype(int)
    rows = zip(*np.unique(packs, return_counts=True), strict=True)
    path.write_text("documents,packs\n" + "".join(f"{count},{times}\n" for count, times in rows))
    return path


def test_the_published_distribution(tmp_path, capsys):
    flags = ["--documents-per-pack", published(tmp_path / "packs.csv"), "--capacities", 64, 106]
    found = tune(capsys, *flags)
    [packs] = found["packers"]
    assert [packs[name] for name in ("p50", "p90", "p99", "max")] == [12, 43, 106, 358]
    assert packs["coverage"]["64"] == pytest.approx(0.96, abs=0.01)
    assert packs["coverage"]["106"] == pytest.approx(0.99, abs=0.002)
    assert found["recommended"]["capacities"][-1] == 358 and not found["measured"]
    assert commands.exit_code("tune", *flags) == 0
    text = capsys.readouterr().out
    assert re.search(r"given +10,000 +12 +43 +106 +358\n", text) and re.search(
        r" 64 +96\.\d\d %\n", text
    )
    assert re.search(r" 358 +100.00 %\n", text) and "is not measured" in text


@pytest.mark.parametrize("method", [None, *METHODS])
def test_recommended_flags_leave_no_pack_to_run_eagerly(tmp_path, capsys, method):
    """The pack plan of a run with the recommended flags has no pack that runs eagerly in three
    epochs.
    """
    data = tmp_path / "data.jsonl"
    write_texts(data, ("a" * length for length in long_tailed(800)))
    flags = ["--seq-length", "512", *([] if method is None else ["--packing-method", method])]
    found = tune(capsys, "--data", data, *flags)
    assert [packer["method"] for packer in found["packers"]] == (
        [method] if method else list(METHODS)
    )
    run = [*UNUSED, "--data-path", str(data), *flags]
    config = parse([*run, *found["recommended"]["flags"]])
    documents = open_documents(config.data, ByteTokenizer(), validates=False, show=False)
    plan, capture_sizes, report = plan_training(config, documents.train)
    if (
        config.packing.packing_method == METHODS[0]
    ):  # a run without the recommended flags has the same packs
        graphs = "--cuda-graph-impl local --cuda-graph-max-packed-seqs auto"
        auto = parse([*run, *shlex.split(graphs)])
        assert plan_training(auto, documents.train)[1].capacities == capture_sizes.capacities
    others = config.packing.packing_method != "balanced"
    assert ("--max-documents-per-pack" in found["recommended"]["flags"]) == others
    chosen = next(
        one for one in found["packers"] if one["method"] == found["recommended"]["method"]
    )
    assert (report.documents_p50, report.documents_p99, report.documents_max) == (
        chosen["p50"],
        chosen["p99"],
        chosen["max"],
    )
    assert report.fill == pytest.approx(chosen["fill"])
    assert (
        max(int(plan.epoch(epoch).documents_per_pack.max()) for epoch in range(3))
        <= capture_sizes.largest
    )


def test_a_histogram_says_the_same_as_its_lengths(tmp_path, lengths, capsys):
    values, times = np.unique(long_tailed(3000), return_counts=True)
    table = tmp_path / "histogram.tsv"
    table.write_text(
        "# of documents\n" + "".join(f"{value}\t{count}\n" for value, count in zip(values, times))
    )
    found = [tune(capsys, "--seq-length", 512, "--lengths", file) for file in (lengths, table)]
    assert found[0]["lengths"] == found[1]["lengths"]
    of, drawn = found[0]["lengths"], long_tailed(3000)
    assert (of["documents"], of["tokens"], of["max"]) == (3000, drawn.sum(), drawn.max())
    assert [of[name] for name in ("p50", "p90", "p99")] == [
        np.quantile(drawn, share) for share in (0.5, 0.9, 0.99)
    ]
    saved_elsewhere = tmp_path / "crlf.txt"
    saved_elsewhere.write_bytes(b"\xef\xbb\xbf" + lengths.read_bytes().replace(b"\n", b"\r\n"))
    assert (
        tune(capsys, "--seq-length", 512, "--lengths", saved_elsewhere)["lengths"]
        == found[0]["lengths"]
    )
    assert (
        main(["plan", *MODEL, "--seq-length", "512", "--lengths", str(table), "--vocab-size", "64"])
        == 0
    )


def test_pictures_need_nothing_else(tmp_path, lengths, capsys):
    pictures = ["--plot", tmp_path / "t.png", "--html", tmp_path / "t.html"]
    tune(capsys, "--seq-length", 512, "--lengths", lengths, *pictures)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "t.html").read_text()
    assert (
        "--cuda-graph-max-packed-seqs" in page and "<svg" in page and "best_fit_decreasing" in page
    )
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", page) and "<script" not in page


def test_pictures_of_documents_of_one_length(tmp_path, capsys):
    """Charts whose numbers span less than a power have a plain axis."""
    same = tmp_path / "same.txt"
    same.write_text("29\n" * 190)
    found = tmp_path / "t.html"
    tune(capsys, "--seq-length", 512, "--lengths", same, "--html", found)
    assert found.read_text().count("<svg") > 1


def costs_of(line, tokens=512, update_ms=3.0, eager=None):
    """Return a cost table whose times are exactly linear: ``line(capacity) = (base, slope)``."""
    works = [1000.0, 5000.0, 90000.0]
    packs = [
        Timed(capacity=c, documents=1, squares=w, ms=line(c)[0] + line(c)[1] * w)
        for c in (4, 16, 64)
        for w in works
    ]
    packs += [Timed(capacity=None, documents=1, squares=w, ms=eager) for w in works if eager]
    return StepCosts(tokens=tokens, update_ms=update_ms, packs=tuple(packs), device="a device")


def test_prediction_from_exact_times(tmp_path, lengths, capsys):
    """With a base of 10 + capacity / 8 ms and 1e-5 ms per squared token, the predicted mean over
    packs equals the value computed by hand.
    """
    costs_of(lambda c: (10 + c / 8, 1e-5), eager=99.0).save(tmp_path / "costs.json")
    assert StepCosts.load(tmp_path / "costs.json").document_cost() == pytest.approx(
        (60 / 8) / (10.5 + 0.32) / 60
    )
    flags = ["--seq-length", 512, "--lengths", lengths, "--costs", tmp_path / "costs.json"]
    flags += shlex.split(
        "--overlong-policy truncate --packing-method sequential --capacities 30 --global-batch-size 4"
    )
    found = tune(capsys, *flags)
    assert found["measured"] and found["update_ms"] == 3
    stream = Packs(long_tailed(3000))
    for capacity in (16, 30, 64):
        price = found["by_capacity"][str(capacity)]
        fits = stream.documents <= capacity
        ms = np.where(fits, 10 + capacity / 8 + 1e-5 * stream.squares, 99.0).mean()
        assert price["micro_batch_ms"] == pytest.approx(ms, rel=1e-9)
        assert price["step_ms"] == pytest.approx(4 * ms + 3, rel=1e-9)
        assert price["eager_share"] == pytest.approx(1 - fits.mean())


def test_the_balanced_packer_is_priced_as_it_keeps_to_a_capacity(tmp_path, lengths, capsys):
    costs_of(lambda c: (10 + c / 8, 0.0), eager=99.0).save(tmp_path / "costs.json")
    flags = ["--seq-length", 512, "--lengths", lengths, "--costs", tmp_path / "costs.json"]
    flags += ["--capacities", 12]
    found = {
        method: tune(capsys, *flags, "--packing-method", method)
        for method in ("balanced", "sequential")
    }
    assert all(run["packers"][0]["max"] > 12 for run in found.values())
    kept, broken = (run["by_capacity"]["12"] for run in found.values())
    assert (kept["eager_share"], kept["micro_batch_ms"]) == (0.0, 11.5) and broken[
        "eager_share"
    ] > 0


def test_a_blend_is_packed_as_it_is_drawn(tmp_path, capsys):
    """The report uses the packs of a blend. With half of the tokens from short documents, packs
    have more documents than with a tenth.
    """
    for name, length in (("short", 7), ("long", 63)):
        line = json.dumps({"text": "a" * length}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(line * (64 * 8 * 8 // (length + 1)))
    means = []
    for shares in ((5, 5), (1, 9)):
        words = [
            word
            for share, name in zip(shares, ("short", "long"))
            for word in (share, tmp_path / f"{name}.jsonl")
        ]
        found = tune(
            capsys, "--seq-length", 64, "--packing-method", "best_fit_decreasing", "--data", *words
        )
        means.append(found["packers"][0]["mean"])
    assert means == [pytest.approx(0.5 * 8 + 0.5, rel=0.02), pytest.approx(0.1 * 8 + 0.9, rel=0.02)]


class Packs:
    """Packs of a sequential packer, computed by this test: the documents and the sum of squared
    lengths of every pack.
    """

    def __init__(self, lengths, slots=512, seed=1234):
        from megatron_packed.data.keyed_random import KeyedRandom

        rows = [[]]
        for length in np.minimum(lengths, slots)[
            KeyedRandom(seed, "documents", 0).permutation(lengths.size)
        ]:
            if sum(rows[-1]) + length > slots:
                rows.append([])
            rows[-1].append(int(length))
        self.documents = np.array([len(row) for row in rows])
        self.squares = np.array([sum(n * n for n in row) + (slots - sum(row)) ** 2 for row in rows])


def test_measuring_here_and_reading_it_again(tmp_path, lengths, capsys, monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "MICRO_BATCHES", 2)
    asked = []
    monkeypatch.setattr(
        tune_command, "apply_environment", asked.append
    )  # the real function would change the environment of this process
    words = shlex.split("--seq-length 64 --vocab-size 64 --packing-method balanced")
    flags = ["--lengths", lengths, *words, *ATTENTION]
    table = tmp_path / "costs.json"
    measured = tune(capsys, *flags, "--measure", table)
    assert (
        len(asked) == 1 and measured["device"] == "cpu" and measured["recommended"]["step_ms"] > 0
    )
    costs = StepCosts.load(table)
    assert (
        costs.tokens == 64
        and costs.knows_eager
        and measured["packers"][0]["max"] in costs.capacities
    )
    assert {pack.squares for pack in costs.packs} >= {64.0**2}
    assert tune(capsys, *flags, "--costs", table)["recommended"] == measured["recommended"]
    code, problem = refusal(capsys, *flags, "--bf16", "--costs", table)
    assert code == 2 and "another dtype (torch.float32, this run: torch.bfloat16)" in problem
    code, problem = refusal(capsys, "--seq-length", 32, "--lengths", lengths, "--costs", table)
    assert code == 2 and "packs of 64 tokens, but this run's have 32" in problem
    # Tables of versions before gradients in bf16 do not name their data type.
    older = {name: value for name, value in costs.model.items() if "main_grads" not in name}
    replace(costs, model={**older, "dtype": "torch.bfloat16"}).save(table)
    assert tune(capsys, *flags, "--bf16", "--costs", table)["recommended"]
    code, problem = refusal(
        capsys, *flags, "--bf16", "--main-grads-dtype", "bf16", "--costs", table
    )
    assert code == 2 and "another main_grads_dtype (fp32, this run: bf16)" in problem


def test_a_table_that_cannot_be_written_is_reported_before_the_measurement(
    lengths, capsys, monkeypatch
):
    monkeypatch.setattr(tune_command, "apply_environment", lambda training: None)
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("minutes are lost"))
    before = lengths.read_bytes()
    flags = ["--seq-length", 64, "--lengths", lengths, "--vocab-size", 64, *ATTENTION, "--measure"]
    for place, words in (
        (lengths, "is not a table of step costs and would be overwritten"),
        (lengths / "x", "correct the path"),
        (lengths.parent, "correct the path"),
    ):
        code, problem = refusal(capsys, *flags, place)
        assert code == 2 and words in problem
    assert lengths.read_bytes() == before


@pytest.mark.parametrize(
    "text, words",
    [
        ("12\n0\n", "line 2"),
        ("12 3 4\n", "line 1"),
        ("", "at least one line"),
        ("5 0\n", "at least one line"),
        ("5\n-1", "line 2"),
        ("5\nx\n", "line 2"),
    ],
)
def test_files_that_hold_something_else(tmp_path, capsys, text, words):
    (tmp_path / "file").write_text(text)
    code, problem = refusal(capsys, "--seq-length", 64, "--lengths", tmp_path / "file")
    assert code == 3 and words in problem


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--lengths F --seq-length 64 --measure t.json", "--measure needs the flags of the model"),
        ("--lengths F --seq-length 64 --capacities 65", "a pack holds at most 64"),
        ("--lengths F --seq-length 64 --capacities 0", "at least 1"),
        ("--lengths F --seq-length 64 --costs nowhere.json", "nowhere.json"),
        ("--documents-per-pack F --seq-length 64", "cannot be combined with --seq-length"),
        ("--documents-per-pack F --costs t.json", "needs the lengths of documents"),
        ("--lengths F", "--seq-length"),
        ("--lengths nowhere --seq-length 64", "nowhere"),
        ("--data nowhere.jsonl --seq-length 64", "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_done_is_refused(lengths, capsys, argv, words):
    code, problem = refusal(capsys, *(lengths if word == "F" else word for word in argv.split()))
    assert code == 2 and words in problem


def test_columns_have_units_and_unknown_times_have_no_column(tmp_path, lengths, capsys):
    flags = ["tune", "--seq-length", "512", "--lengths", str(lengths)]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "ms" not in text and " -\n" not in text
    assert "Cost of a token: 1.0 is the cost in a full pack at capacity 0.\n" in text
    costs_of(lambda c: (10 + c / 8, 0.0)).save(tmp_path / "costs.json")
    assert main([*flags, "--costs", str(tmp_path / "costs.json"), "--capacities", "12"]) == 0
    text = capsys.readouterr().out
    assert "micro-batch (ms)  step (ms)  tokens/s of a replica\n" in text
    assert "1.0 is the cost in a full pack at capacity 4, the lowest of the table.\n" in text


def test_the_processes_share_a_global_batch(tmp_path, lengths, capsys):
    costs_of(lambda c: (10 + c / 8, 0.0), update_ms=3.0).save(tmp_path / "costs.json")
    flags = ["--seq-length", 512, "--lengths", lengths, "--costs", tmp_path / "costs.json"]
    flags += ["--global-batch-size", 32]
    for size, micro_batches in ((None, 32), (8, 4), (32, 1)):
        more = [] if size is None else ["--world-size", size]
        found = tune(capsys, *flags, *more)
        assert (found["world_size"], found["micro_batches_per_step"]) == (size or 1, micro_batches)
        best = found["recommended"]
        expected = micro_batches * best["micro_batch_ms"] + 3
        assert best["step_ms"] == pytest.approx(expected, rel=1e-9)
    assert main(["tune", *map(str, flags), "--world-size", "8"]) == 0
    assert "In a step of 8 processes each replica has 4 micro-batches; " in capsys.readouterr().out
    assert tune(capsys, *flags[:4], "--world-size", 4)["micro_batches_per_step"] == 1
    for words, sentence in (
        ([*flags, "--world-size", 0], "--world-size 0: must be at least 1"),
        ([*flags, "--world-size", 5], "--global-batch-size"),
        (
            ["--documents-per-pack", lengths, "--world-size", 2],
            "--world-size has no effect with --documents-per-pack",
        ),
    ):
        code, said = refusal(capsys, *words)
        assert code == 2 and sentence in said


def test_one_replica_is_measured(tmp_path, lengths, capsys, monkeypatch):
    seen = []

    def recorded(config, vocab_size, capacities, say):
        seen.append((config.packing.global_batch_size, vocab_size))
        return costs_of(lambda c: (10 + c / 8, 0.0))

    monkeypatch.setattr(measure, "measure", recorded)
    flags = ["--seq-length", 512, "--lengths", lengths, *MODEL, "--vocab-size", 300]
    flags += ["--global-batch-size", 32, "--measure", tmp_path / "costs.json"]
    for size in (1, 8):
        tune(capsys, *flags, "--world-size", size)
    assert seen == [(32, 300), (4, 300)]
