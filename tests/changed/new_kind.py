"""Tests of the gated short convolution (``S``), a kind of layer that ``data/new_kind`` adds.

No file of the package is edited for it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.cli.main import main
from megatron_packed.layers.recurrent_mixer import CausalConv1d
from megatron_packed.models.convert.megatron import export_megatron
from megatron_packed.models.decoder import Decoder
from megatron_packed.models.isolation import check_isolation
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases
from support.runs import Data, command_line, in_folder, losses, run, saved_steps, tiny_options

PATTERN = "S*SM-E"
SAVED, LAST = 3, 6
RECOMPUTES = {"recompute_granularity": "selective", "recompute_modules": "short_conv"}
OFFLOADS = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ("short_conv_norm", "short_conv_scan"),
    "min_offloaded_tensor_size": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data.make(tmp_path_factory.mktemp("data"))


def options(data: Data, folder: Path, **changes: Any) -> dict[str, Any]:
    kept = {"hybrid_layer_pattern": PATTERN, "short_conv_channels": 32, "save_interval": SAVED}
    schedule = {"train_iters": LAST, "no_isolation_self_test": None}
    return tiny_options(data, **in_folder(folder), **kept, **schedule) | changes


def test_it_trains_and_resumes_in_another_layout(data: Data, tmp_path: Path) -> None:
    """Recomputed on one rank, then offloaded on two: the losses of a run without either."""
    plain = run(options(data, tmp_path / "plain"), tmp_path / "plain")
    assert plain.exit_code == 0, plain.console
    assert "short-convolution" not in plain.console
    folder = tmp_path / "moved"
    begun = run(options(data, folder, exit_interval=SAVED, **RECOMPUTES), folder / "begun")
    assert begun.exit_code == 0, begun.console
    two = {"tensor_model_parallel_size": 2, **OFFLOADS}
    ended = run(options(data, folder, **two), folder / "ended", processes=2)
    assert ended.exit_code == 0, ended.console
    assert saved_steps(folder)[0] == LAST
    expected = losses(tmp_path / "plain" / "log.jsonl")
    assert losses(folder / "log.jsonl") == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


def test_context_parallel_ranks_exchange_its_channels(data: Data, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, processes in ((one, 1), (two, 2)):
        changes = {"context_parallel_size": processes, "train_iters": 3}
        ended = run(options(data, folder, **changes), folder, processes=processes)
        assert ended.exit_code == 0, ended.console
    assert losses(two / "log.jsonl") == pytest.approx(losses(one / "log.jsonl"), rel=1e-4)


def test_it_is_planned_and_estimated(capsys: pytest.CaptureFixture[str], data: Data) -> None:
    flags = options(data, data.folder, vocab_size=512)
    for name in ("load", "save", "log_jsonl", "save_interval", "no_isolation_self_test"):
        del flags[name]

    def plan(pattern: str) -> dict[str, Any]:
        found = command_line(flags | {"hybrid_layer_pattern": pattern})
        assert main(["plan", *found, "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    with_it, without = plan(PATTERN), plan(PATTERN[1:])
    hidden, channels, width = 32, 32, 4
    weights = hidden * 2 * channels + channels * width + channels * hidden + hidden
    assert parameters(with_it) - parameters(without) == weights
    assert activations(with_it) > activations(without)


def parameters(report: dict[str, Any]) -> int:
    total: int = report["step"]["multiplied_parameters"]
    return total


def activations(report: dict[str, Any]) -> float:
    amount: float = report["ranks"]["every rank"]["bytes"]["activations"]
    return amount


def test_it_is_explained(data: Data, tmp_path: Path) -> None:
    ended = run(options(data, tmp_path, explain=True), tmp_path)
    assert ended.exit_code == 0, ended.console
    assert re.search(r"kernel causal_conv1d +\S+ +reference", ended.console), ended.console


def test_a_size_that_ranks_cannot_share_is_refused(data: Data, tmp_path: Path) -> None:
    changes = {"tensor_model_parallel_size": 2, "short_conv_channels": 31}
    ended = run(options(data, tmp_path, **changes), tmp_path, processes=2)
    assert ended.exit_code == 2, ended.console
    assert "does not divide --short-conv-channels (31)" in ended.console


def test_an_export_to_megatron_names_its_options() -> None:
    assert {"short_conv_channels", "short_conv_width"} <= export_megatron._our_options()


def test_it_decodes() -> None:
    """A step with the cached states gives the logits of a pass over the complete text."""
    model = cases.tiny_model("S*S-").eval()
    texts = [[3], [5, 7], [2, 3, 4, 5, 6, 7, 8]]  # shorter and longer than the convolution
    decoder = Decoder(model)
    logits = decoder.prefill(texts)
    for _ in range(3):
        for text, logits_V in zip(texts, logits, strict=True):
            packed = PackedSeqParams.from_lengths([len(text)], len(text))
            with torch.no_grad():
                expected_V = model.logits(torch.tensor(text, dtype=torch.int32), packed)[-1]
            torch.testing.assert_close(logits_V, expected_V, rtol=0, atol=1e-4)
        tokens = logits.argmax(-1).tolist()
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        logits = decoder.step(tokens)


def test_it_is_isolated_and_the_check_sees_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cases.tiny_model("S-").config
    results = check_isolation(config, "cpu", torch.float32)
    assert all(result.passed for result in results)
    assert any(result.symbol == "S" and result.leak for result in results)
    convolve = CausalConv1d.forward

    def leaking(
        self: CausalConv1d, x_TC: torch.Tensor, seq_idx_1T: torch.Tensor, *more: Any
    ) -> Any:
        return convolve(self, x_TC, torch.zeros_like(seq_idx_1T), *more)

    monkeypatch.setattr(CausalConv1d, "forward", leaking)
    assert not all(result.isolated for result in check_isolation(config, "cpu", torch.float32))


@pytest.mark.gpu
def test_graphs_replay_what_eager_layers_compute(data: Data, tmp_path: Path) -> None:
    graphs = {
        "cuda_graph_impl": "local",
        "cuda_graph_modules": "short_conv",
        "cuda_graph_strict": True,
        "device": "cuda",
        "bf16": True,
        "deterministic_mode": True,
    }
    eager = {**graphs, "cuda_graph_modules": None, "cuda_graph_strict": None}
    eager["cuda_graph_impl"] = None
    found = []
    for name, changes in (("graphs", graphs), ("eager", eager)):
        ended = run(options(data, tmp_path / name, **changes), tmp_path / name)
        assert ended.exit_code == 0, ended.console
        found.append(losses(tmp_path / name / "log.jsonl"))
    assert found[0] == found[1]
