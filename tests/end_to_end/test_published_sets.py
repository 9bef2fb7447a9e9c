"""Training on instruction sets in published shapes, as whole runs with flags only."""

from pathlib import Path

from megatron_packed.data.tokenizers.base import ByteTokenizer
from support.data_helpers import conversation, open_lines
from support.published_sets import alpaca, nested, sharegpt
from support.runs import Data, start, steps, tiny_options


def test_published_sets_train_with_flags_only(data: Data, tmp_path: Path) -> None:
    """Two runs train, one validates on a third set, and the console counts documents and targets."""
    array, squad, zstd = alpaca(tmp_path), nested(tmp_path), sharegpt(tmp_path)
    common = {"train_iters": 3, "data_cache_path": tmp_path / "cache", "seq_length": 256}
    validation = {"valid_data_path": zstd.path, "eval_interval": 3, "eval_iters": 1}
    first = tiny_options(data, train_data_path=array.path, **common, **validation)
    fields = {"data_fields": squad.data_fields, "log_jsonl": tmp_path / "log.jsonl"}
    second = tiny_options(data, train_data_path=squad.path, **fields, **common)
    runs = (
        (array, start(first, tmp_path / "a")),
        (squad, start(second, tmp_path / "b")),
    )
    reference = open_lines(tmp_path, [conversation("q", "aaa")], tokenizer=ByteTokenizer())
    ends = int(reference.target_counts[0]) - 3  # targets after each answer
    for published, started in runs:
        finished = started.wait()
        assert finished.exit_code == 0, finished.console
        documents, lines = len(published.answers), len(published.answers) + published.empty
        targets = published.num_bytes + ends * documents
        for sentence in (
            f"{documents} of {lines} lines of {published.path} are usable ({documents} alpaca); "
            f"left out: {published.empty} empty_assistant",
            f"{lines} lines in 1 file: {documents} used (",
            f", {targets} of them targets; the longest document has ",
        ):
            assert finished.console.count(sentence) == 1, (sentence, finished.console)
    assert (
        f"--valid-data-path: 30 lines in 1 file: {len(zstd.answers)} used"
        in (tmp_path / "a" / "output_0.txt").read_text()
    )
    assert [step["lm_loss"] > 0 for step in steps(tmp_path / "log.jsonl")] == [True] * 3
