"""Every script that runs on a CPU writes its results, and `tables.py` makes rows of them."""

import numpy as np
import pytest

import capacity_cost
import generation
import harness
import tables

QUICK = {
    "beside_flash_qla": "",
    "capacity_cost": "shard8b_4096 --capacities 64 16 --backends reference flash_attn_4",
    "elementwise": "",
    "gated_delta_rule": "",
    "generation": "--hidden-size 128 --batches 2",
    "gradient_sums": "",
    "lora_expand": "",
    "metadata_sync": "wide",
    "packed_vs_padded": "hybrid1b_docs",
    "ssd": "",
}
"""Scripts with their options in addition to ``--quick --device cpu``."""


@pytest.mark.parametrize("script", QUICK)
def test_a_script_writes_results_that_have_tables(script, run_script, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "LENGTHS", (3, 9))
    monkeypatch.setattr(generation, "VOCAB", 64)
    document = run_script(script, "--quick", "--device", "cpu", *QUICK[script].split())
    assert str(tmp_path.parent) not in document["command"]
    written = tables.Results(tmp_path)
    names = [name for name, one in tables.TABLES.items() if one.files == (script,)]
    assert any(written.rows(name) for name in names) or script == "ssd"  # no kernel for a CPU


def test_what_the_device_cannot_run_is_in_the_results(run_script):
    options = ("--quick", "--device", "cpu")
    found = run_script("gated_delta_rule", *options)["results"]
    assert "CUDA device" in found["times"]["triton"]
    assert max(found["errors"]["reference"].values()) < 1e-5
    [found] = run_script("beside_flash_qla", *options)["results"]["sizes"]
    assert (
        all("flash_qla" in text for text in found["failed"].values()) and len(found["failed"]) == 4
    )
    assert max(found["errors"]["megatron_packed"].values()) < 1e-5
    kernels = run_script("elementwise", *options)["results"]["kernels"]
    assert "NoBackendError" in kernels.pop("causal_conv1d, library")["failed"]
    assert all(one["forward"]["share"] > 0 for one in kernels.values())
    sizes = capacity_cost.Size("shard8b", 128), capacity_cost.long_tailed(128)
    cost = capacity_cost.attention_cost(
        *sizes, ["flash_attn_4"], [16], harness.torch.device("cpu"), 1
    )
    assert all(text.startswith("refused: ") for text in cost["flash_attn_4"]["T"].values())


def test_packing_report_of_lengths(run_script, tmp_path):
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(5, 400, 500))
    options = (tmp_path / "lengths.npy", "--slots", "512", "--epochs", "2")
    document = run_script("packing_report", *options)
    assert str(tmp_path) not in document["command"]
    [tokens] = tables.Results(tmp_path).rows("packing_tokens")
    assert tokens["tokens in"] == tokens["kept"] + tokens["truncated"] + tokens["dropped"]
