"""Tests of the cache: its content, the detection of damage, and that several processes build it
once.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_packed.config.sections.data_parts.tokenizer import DATA_RULES, EARLIER_RULES
from megatron_packed.data.errors import DataError
from megatron_packed.data.sources import checked_arrays as arrays
from megatron_packed.data.sources.tokenized_dataset import TokenizedDataset
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.chat_format import (
    IdentityFormat,
    chat_format,
)
from support.data_helpers import byte_level, conversation, open_files, open_lines, save_tokenizer

TEXTS = ["abc", "é", "a longer document with more than sixteen tokens", "x" * 300]
LINES = [json.dumps({"text": text}) for text in TEXTS]


def test_documents_lengths_and_counts(tmp_path):
    dataset = open_lines(tmp_path, LINES, sft=False)
    lengths = [len(text.encode()) + 1 for text in TEXTS]
    assert dataset.lengths.tolist() == lengths
    assert dataset.target_counts.tolist() == [n - 1 for n in lengths]
    tokens, targets = dataset.document(0)
    assert (tokens.dtype, targets.dtype) == (np.int32, np.uint8)
    assert (tokens.tolist(), targets.tolist()) == ([97, 98, 99, 256], [0, 1, 1, 1])
    assert not tokens.flags.writeable and not targets.flags.writeable
    tokens, targets = dataset.document(0, start=1, length=2)
    assert (tokens.tolist(), targets.tolist()) == ([98, 99], [1, 1])
    for piece in [(4,), (-1,), (0, 4), (0, 0, 5), (0, 2, 3), (0, -1, 2), (0, 0, 0)]:
        with pytest.raises(IndexError):
            dataset.document(*piece)
    report = dataset.report
    assert (report.lines, report.good, report.documents, report.tokens) == (4, 4, 4, sum(lengths))
    assert (report.schemas, report.longest_document) == ({"text": 4}, 301)
    assert (
        "4 lines in 1 file: 4 used (4 text), 0 blank, 0 in quarantine"
        in report.lines_of_text(tmp_path)[0]
    )


def test_targets_of_pieces(tmp_path):
    dataset = open_lines(tmp_path, [conversation("qq", "aaa"), conversation("q", "a", "q", "aaaa")])
    masks = [dataset.document(n)[1] for n in range(2)]
    pieces = [
        (0, 0, len(masks[0])),
        (1, 0, len(masks[1])),
        (1, 0, 31),
        (1, 31, 17),
        (1, 37, 1),
        (0, 22, 3),
    ]
    counts = dataset.count_targets(*(np.array(column) for column in zip(*pieces)))
    assert counts.tolist() == [int(masks[d][s + 1 : s + n].sum()) for d, s, n in pieces]
    assert counts[:2].tolist() == dataset.target_counts.tolist() == [4, 7]
    assert counts[-1] == 2  # the marked first token of the piece does not count


def test_entropy_of_targets(tmp_path):
    dataset = open_lines(tmp_path, [json.dumps({"prompt": "zzzz", "completion": "ab"})] * 3)
    assert dataset.target_entropy() == pytest.approx(
        np.log(3)
    )  # three targets are equally frequent: a, b and the end of document


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_the_result(tmp_path, monkeypatch, threads):
    monkeypatch.setattr("megatron_packed.data.sources.tokenize_files._CHUNK_LINES", 3)
    lines = [conversation(f"q{n}", f"a{n}") for n in range(200)] + ["{", ""]
    dataset = open_lines(tmp_path, lines, num_threads=threads)
    answers = [
        ByteTokenizer().decode(t[m == 1], skip_special=True)
        for t, m in map(dataset.document, range(len(dataset)))
    ]
    assert answers == [f"a{n}" for n in range(200)]
    assert (dataset.report.blank, dataset.report.bad) == (1, {"malformed_json": 1})


# -----------------------------------------------------------------------------------------------------------
# one cache


def built_once(tmp_path) -> list[Path]:
    return [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_the_same_data_is_tokenised_once_and_other_options_again(tmp_path, monkeypatch):
    first = open_lines(tmp_path, LINES, sft=False)
    monkeypatch.setattr(
        "megatron_packed.data.sources.tokenized_dataset.build_arrays", None
    )  # calling None would fail, so the cache must not be built again
    assert open_lines(tmp_path, LINES, sft=False).key == first.key
    moved = tmp_path / "moved.jsonl"
    shutil.copy(tmp_path / "data.jsonl", moved)
    options = {"sft": False, "cache_root": tmp_path / "cache"}
    again = open_files([moved], **options)
    assert again.key == first.key
    monkeypatch.undo()
    keys = {
        first.key,
        open_lines(tmp_path, LINES, sft=False, max_line_bytes=100).key,
        open_files([moved], chat=IdentityFormat(), **options).key,
        open_lines(tmp_path, [*LINES, LINES[0]], sft=False).key,
    }
    assert len(keys) == len(built_once(tmp_path)) == 4


@pytest.mark.parametrize("rules", [EARLIER_RULES, DATA_RULES])
def test_cached_tokens_do_not_lift_the_refusal_of_a_tokenizer_without_chatml(tmp_path, rules):
    tokenizer = save_tokenizer(tmp_path, byte_level(("</s>",)), eos_token="</s>")
    prompts = [json.dumps({"prompt": "q", "completion": "a"})]

    def opened(template: str | None, lines: list[str]) -> TokenizedDataset:
        chat = chat_format(tokenizer, template)
        return open_lines(tmp_path, lines, tokenizer=tokenizer, chat=chat, rules=rules)

    for lines in ([conversation("q", "a")], [conversation("q", "a"), *prompts]):
        assert len(opened("chatml", lines)) == len(lines)
        with pytest.raises(DataError, match="the tokenizer has no chat template"):
            opened(None, lines)
        assert len(opened("chatml", lines)) == len(lines)
    # A prompt and its completion need no template.
    assert opened(None, prompts).key == opened("chatml", prompts).key


def test_the_default_place_is_beside_the_data(tmp_path):
    dataset = open_lines(tmp_path, LINES, sft=False, cache_root=None)
    assert dataset.directory.parent == tmp_path / ".megatron_packed_cache"


def test_a_place_that_cannot_be_written_is_an_error_with_a_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-cache-path"):
        open_lines(tmp_path, LINES, sft=False, cache_root=tmp_path / "file" / "cache")


def _open_in_process(tmp_path, barrier, results):
    from megatron_packed.data.sources import tokenized_dataset as module

    build = module.build_arrays

    def counted(*arguments):
        (tmp_path / f"built-by-{os.getpid()}").touch()
        time.sleep(0.2)  # enough time for the other processes to start
        return build(*arguments)

    module.build_arrays = counted
    barrier.wait()
    try:
        cache = {"cache_root": tmp_path / "cache", "max_bad_fraction": 0.5}
        dataset = open_files([tmp_path / "data.jsonl"], sft=False, num_threads=1, **cache)
        dataset.verify()
        results.put(("ok", dataset.key, int(dataset.lengths.sum())))
    except DataError as error:
        results.put(("error", str(error), 0))


def race(tmp_path, lines, processes=4):
    (tmp_path / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_open_in_process, args=(tmp_path, barrier, results))
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    return answers, len(list(tmp_path.glob("built-by-*")))


def test_four_processes_at_once_build_one_cache(tmp_path):
    answers, builders = race(tmp_path, LINES * 50)
    assert len(set(answers)) == 1 and answers[0][0] == "ok"
    assert builders == 1
    assert len(built_once(tmp_path)) == 1
    assert not list((tmp_path / "cache").glob(".*"))


def test_four_processes_raise_the_same_error_for_bad_data_and_only_one_reads_it(tmp_path):
    answers, builders = race(tmp_path, ["{"] * 50)
    assert len(set(answers)) == 1 and answers[0][0] == "error" and "50 of 50 lines" in answers[0][1]
    assert builders == 1
    assert built_once(tmp_path) == []
    (tmp_path / "data.jsonl").write_text(
        "\n".join(LINES)
    )  # corrected data is tokenised despite the earlier failure
    assert len(open_lines(tmp_path, LINES, sft=False)) == 4
    answers, _ = race(tmp_path, ["{"] * 50)  # a later run with the bad data fails again
    assert {answer[0] for answer in answers} == {"error"}


def test_without_locks_the_slower_builder_takes_what_the_faster_made(tmp_path, monkeypatch):
    """Without file locks several processes build the same cache, and all use the one renamed first.

    Some shared file systems have no locks.
    """

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("megatron_packed.data.sources.cache_directory.fcntl.flock", no_locks)
    answers, builders = race(tmp_path, LINES * 50)
    assert len(set(answers)) == 1 and answers[0][0] == "ok"
    assert builders > 1
    assert len(built_once(tmp_path)) == 1 and not list((tmp_path / "cache").glob(".*"))


SLOW_WRITER = """
import sys, time
from megatron_packed.data.sources import checked_arrays as arrays, tokenized_dataset as dataset
from megatron_packed.data.tokenizers.chat_format import IdentityFormat
from megatron_packed.data.tokenizers.base import ByteTokenizer
kill_at = sys.argv[3]
real = {"manifest": dataset.write_manifest, "build": dataset.build_arrays}
def stop(*_):
    print("here", flush=True); time.sleep(60)
if kill_at == "building": dataset.build_arrays = stop
if kill_at == "manifest": dataset.write_manifest = stop
if kill_at == "quarantine":
    from megatron_packed.data.sources.data_report import Quarantine
    Quarantine.close = stop
if kill_at == "rename":
    from megatron_packed.data.sources import cache_directory as cache
    cache._publish = stop
dataset.open_dataset([sys.argv[1]], ByteTokenizer(), IdentityFormat(), sft=False, cache_root=sys.argv[2], show=False,
    max_bad_fraction=0.5)
"""


@pytest.mark.parametrize("kill_at", ["building", "manifest", "rename", "quarantine"])
def test_a_killed_writer_leaves_nothing_harmful(tmp_path, kill_at):
    path, root = tmp_path / "data.jsonl", tmp_path / "cache"
    path.write_text("\n".join([*LINES, "{"] if kill_at == "quarantine" else LINES))
    repository = str(Path(arrays.__file__).parents[2])
    writer = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, path, root, kill_at],
        stdout=subprocess.PIPE,
        cwd=repository,
    )
    assert writer.stdout.readline() == b"here\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    left = [name for name in os.listdir(root) if ".tmp-" in name]
    assert len(left) == (2 if kill_at == "quarantine" else 1)
    options = {"sft": False, "cache_root": root, "max_bad_fraction": 0.5}
    dataset = open_files([path], chat=IdentityFormat(), **options)
    dataset.verify()
    assert dataset.lengths.sum() == sum(len(text.encode()) + 1 for text in TEXTS)
    assert not [name for name in os.listdir(root) if ".tmp-" in name]


def test_a_damaged_directory_that_was_not_removed_is_removed_by_the_next_build(tmp_path):
    open_lines(tmp_path, LINES, sft=False)
    [directory] = built_once(tmp_path)
    aside = directory.with_name(f".{directory.name}.bad-0123abcd")
    directory.rename(aside)
    open_lines(tmp_path, LINES, sft=False)
    assert built_once(tmp_path) == [directory] and not aside.exists()


def test_a_writer_on_another_node_is_left_alone_until_it_is_old(tmp_path):
    root = tmp_path / "cache"
    open_lines(tmp_path, LINES, sft=False)
    [directory] = built_once(tmp_path)
    shutil.rmtree(directory)
    young, old = (root / f".{directory.name}.tmp-other-node-1-{n:08d}" for n in range(2))
    for left in (young, old):
        left.mkdir()
    os.utime(old, (0, 0))
    open_lines(tmp_path, LINES, sft=False)
    assert young.exists() and not old.exists()


# --------------------------------------------------------------------------------------------------------------
# damage


def test_every_flipped_byte_is_found_before_it_is_used(tmp_path, monkeypatch):
    """A flipped bit at any of many places of every file is detected.

    Either opening the cache or reading the damaged block raises an error.
    """
    monkeypatch.setattr(arrays, "CHECKSUM_BLOCK_BYTES", 64)
    good = open_lines(tmp_path, LINES * 5, sft=False)
    expected = [good.document(n)[0].tolist() for n in range(len(good))]
    random = np.random.default_rng(0)
    flips = silent = 0
    for path in sorted(good.directory.iterdir()):
        whole = path.read_bytes()
        for at in random.choice(len(whole), size=min(40, len(whole)), replace=False):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << int(random.integers(8))
            path.write_bytes(damaged)
            flips += 1
            try:
                dataset = TokenizedDataset(good.directory)
                dataset.verify()
                silent += [dataset.document(n)[0].tolist() for n in range(len(dataset))] != expected
                silent += json.loads(damaged) != json.loads(whole) if path.suffix == ".json" else 1
            except DataError as error:
                assert str(path) in str(error) or str(good.directory) in str(error)
        path.write_bytes(whole)
    assert flips > 200
    assert silent == 0


def test_a_flip_is_found_by_the_read_that_meets_it_and_by_no_other(tmp_path):
    texts = [
        json.dumps({"text": chr(97 + n) * 40_000}) for n in range(4)
    ]  # each document has more than two blocks of tokens
    dataset = open_lines(tmp_path, texts, sft=False)
    path = dataset.directory / "tokens.bin"
    raw = bytearray(path.read_bytes())
    raw[4 * 40_001 + 4 * 20_000] ^= 4  # in the middle of document 1
    path.write_bytes(raw)
    damaged = TokenizedDataset(dataset.directory)
    for number in (0, 2, 3):
        damaged.document(number)
    with pytest.raises(
        DataError, match=r"tokens.bin: bytes \d+ to \d+ changed since they were written"
    ):
        damaged.document(1)
    damaged.document(1, 0, 100)
    with pytest.raises(DataError, match="written"):
        damaged.verify()


@pytest.mark.parametrize("damage", ["cut", "longer", "missing", "manifest", "index"])
def test_a_damaged_cache_is_built_again(tmp_path, damage, capsys):
    dataset = open_lines(tmp_path, LINES, sft=False)
    if damage == "manifest":
        (dataset.directory / "manifest.json").write_text("{")
    elif damage == "missing":
        (dataset.directory / "targets.bin").unlink()
    else:
        path = dataset.directory / ("offsets.bin" if damage == "index" else "tokens.bin")
        raw = path.read_bytes()
        path.write_bytes(
            {"cut": raw[:-1], "longer": raw + b"\0", "index": bytes([raw[0] ^ 1]) + raw[1:]}[damage]
        )
    with pytest.raises(DataError, match=str(dataset.directory)):
        TokenizedDataset(dataset.directory)
    again = open_lines(tmp_path, LINES, sft=False, show=True)
    assert "building it again" in capsys.readouterr().err
    assert again.lengths.tolist() == dataset.lengths.tolist()
    again.verify()
    assert not list((tmp_path / "cache").glob(".*"))


def test_files_of_two_caches_do_not_mix(tmp_path):
    first = open_lines(tmp_path, LINES, sft=False)
    second = open_lines(tmp_path, LINES[::-1], sft=False)
    assert first.directory != second.directory
    shutil.copy(
        first.directory / "tokens.bin", second.directory / "tokens.bin"
    )  # both files have the same size
    with pytest.raises(DataError, match="written"):
        TokenizedDataset(second.directory).verify()


def test_links_beside_a_cache_are_not_followed(tmp_path):
    """Other users may write to the folder of the cache: the names of its files are known."""
    victim, cache = tmp_path / "victim", tmp_path / "cache"
    victim.write_text("precious")
    open_lines(tmp_path, [*LINES, "{"], sft=False)
    [name] = [path.name for path in cache.iterdir() if path.is_dir()]
    shutil.rmtree(cache)
    cache.mkdir()
    lock, quarantine = cache / f"{name}.lock", cache / f"{name}.quarantine.jsonl"
    for path in (lock, quarantine, cache / f".{quarantine.name}.tmp"):
        path.symlink_to(victim)
    with pytest.raises(DataError, match=r"\.lock cannot be written: Too many levels of symbolic"):
        open_lines(tmp_path, [*LINES, "{"], sft=False)
    lock.unlink()
    open_lines(tmp_path, [*LINES, "{"], sft=False)
    assert victim.read_text() == "precious"
    assert "malformed_json" in quarantine.read_text() and not quarantine.is_symlink()
