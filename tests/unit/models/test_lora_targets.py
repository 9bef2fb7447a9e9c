"""Words of ``--lora-target-modules`` and ``--lora-modules-to-save``: matrices that get adapters, and
weights that are trained whole.
"""

import dataclasses
import math
import re

import pytest
import torch

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.models.hybrid_model import HybridModel
from support.layouts import MODEL, VOCAB

LLAMA = {
    "hybrid_layer_pattern": "*-*-",
    "num_experts": None,
    "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_router_enable_expert_bias": False,
    "mtp_num_layers": None,
    "squared_relu": False,
    "swiglu": True,
}
"""Changes to a model that the family of Llama can hold."""
QWEN = {
    **LLAMA,
    "hybrid_layer_pattern": "*E*E",
    "num_experts": 8,
    "moe_router_score_function": "softmax",
    "qk_layernorm": True,
}
"""Changes to a model that the family of Qwen3 with experts can hold."""
PROJECTIONS = {
    "layers.0.mixer.in_proj": 1,
    "layers.0.mixer.out_proj": 1,
    "layers.1.mixer.qkv": 3,
    "layers.1.mixer.proj": 1,
    "layers.2.mixer.fc1": 1,
    "layers.2.mixer.fc2": 1,
    "layers.4.mixer.in_proj": 1,
    "layers.4.mixer.out_proj": 1,
    "mtp.0.eh_proj": 1,
    **{
        f"layers.{layer}.mixer.{name}": 1
        for layer in (3, 5)
        for name in (
            "experts.fc1",
            "experts.fc2",
            "fc1_latent_proj",
            "fc2_latent_proj",
            "shared_expert.fc1",
            "shared_expert.fc2",
        )
    },
}
"""Projections of `MODEL`, and the number of matrices of each."""


def model_of(*words: str, saved: tuple[str, ...] = (), **changes) -> HybridModel:
    config = dataclasses.replace(
        MODEL,
        lora_rank=2,
        lora_target_modules=words or ("all-linear",),
        lora_modules_to_save=saved,
        **changes,
    )
    return HybridModel(config, vocab_size=VOCAB, max_positions=8, device="meta")


def adapted(*words: str, **changes) -> dict[str, int]:
    """Return the projections with an adapter, and the number of adapted matrices of each."""
    model = model_of(*words, **changes)
    return {
        name.removesuffix(".lora.A").removesuffix("_lora.A"): parameter.shape[-2] // 2
        for name, parameter in model.named_parameters()
        if name.endswith("lora.A")
    }


def ending(*ends: str) -> dict[str, int]:
    return {name: count for name, count in PROJECTIONS.items() if name.endswith(ends)}


def test_all_linear_is_every_projection_and_everything_else_is_frozen():
    found = adapted()
    assert found == PROJECTIONS
    assert not {name for name in found if "router" in name or "embedding" in name}
    trained = [name for name, p in model_of().named_parameters() if p.requires_grad]
    assert all(name.endswith((".A", ".B")) for name in trained)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("attention",), ending(".qkv", ".proj")),
        (("mamba",), ending("0.mixer.in_proj", "0.mixer.out_proj")),
        (("gdn",), ending("4.mixer.in_proj", "4.mixer.out_proj")),
        (("mlp",), ending("2.mixer.fc1", "2.mixer.fc2")),
        (("shared-experts",), ending("shared_expert.fc1", "shared_expert.fc2")),
        (("latent",), ending("latent_proj")),
        (("experts",), ending(".experts.fc1", ".experts.fc2")),
        (("linear_fc2",), ending(".fc2")),
        (("*.experts.linear_fc1",), ending(".experts.fc1")),
        (("linear_qkv", "linear_proj"), ending(".qkv", ".proj")),
        (("in_proj", "out_proj"), ending("in_proj", "out_proj")),
        (("eh_proj",), ending("eh_proj")),
        (("mtp.*",), ending("eh_proj")),
        (("layers.[12].*",), ending("1.mixer.qkv", "1.mixer.proj", "2.mixer.fc1", "2.mixer.fc2")),
        (("*.layers.1.*.linear_qkv",), ending("1.mixer.qkv")),
        (("decoder.layers.4.*",), ending("4.mixer.in_proj", "4.mixer.out_proj")),
        (("q_proj", "v_proj"), {"layers.1.mixer.qkv": 2}),
        (("linear_k",), {"layers.1.mixer.qkv": 1}),
        (("mixer.o_proj", "gdn"), ending("1.mixer.proj", "4.mixer.in_proj", "4.mixer.out_proj")),
    ],
    ids=str,
)
def test_words_of_a_model_that_fits_no_family(words, expected):
    assert adapted(*words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("gate_proj", "q_proj"), {"1.mixer.fc1": 1, "0.mixer.qkv": 1}),
        (("linear_fc1",), {"1.mixer.fc1": 2}),
        (("linear_fc1_up", "linear_q"), {"1.mixer.fc1": 1, "0.mixer.qkv": 1}),
        (("mlp.down_proj",), {"1.mixer.fc2": 1}),
        (("q_proj", "k_proj", "v_proj", "o_proj"), {"0.mixer.qkv": 3, "0.mixer.proj": 1}),
    ],
    ids=str,
)
def test_words_of_a_family_are_its_names(words, expected):
    both = {
        f"layers.{int(name[0]) + 2 * block}{name[1:]}": count
        for block in (0, 1)
        for name, count in expected.items()
    }
    assert adapted(*words, **LLAMA) == both


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("up_proj", "down_proj"), {"fc1": 1, "fc2": 1}),
        (("gate_up_proj",), {"fc1": 1}),
        (("mlp.experts.*",), {}),  # a pattern is for complete names
        (("*.mlp.experts.*", "linear_fc2"), {"fc1": 1, "fc2": 1}),
        (("linear_fc1_gate",), {"fc1": 1}),
    ],
    ids=str,
)
def test_gate_and_up_of_routed_experts_are_one_matrix(words, expected):
    if not expected:
        with pytest.raises(ConfigError, match="names no matrix"):
            adapted(*words, **QWEN)
        return
    names = {f"layers.{n}.mixer.experts.{name}": 1 for n in (1, 3) for name in expected}
    assert adapted(*words, **QWEN) == names


def test_layers_are_numbered_as_in_the_names_that_a_pattern_fits():
    """Layer 1 of the Hugging Face model is the layers 2 and 3 of the pattern."""
    second = {"layers.2.mixer.qkv": 3, "layers.2.mixer.proj": 1}
    mlp = {"layers.3.mixer.fc1": 2, "layers.3.mixer.fc2": 1}
    assert adapted("model.layers.1.*", **LLAMA) == {**second, **mlp}
    assert adapted("*.layers.1.*", **LLAMA).keys() == {"layers.1.mixer.fc1", "layers.1.mixer.fc2"}


def test_rows_of_other_matrices_have_no_adapter():
    model = model_of("k_proj", **LLAMA)
    lora = model.layers[0].mixer.qkv.lora
    heads, groups, width = MODEL.num_attention_heads, MODEL.num_query_groups, MODEL.kv_channels
    assert lora.B.shape == ((heads + 2 * groups) * width, 2)
    config = dataclasses.replace(MODEL, lora_rank=2, lora_target_modules=("k_proj",), **LLAMA)
    real = HybridModel(config, vocab_size=VOCAB, max_positions=8, device="cpu")
    update = real.layers[0].mixer.qkv.lora
    with torch.no_grad():
        update.B.fill_(1)
    rows = update.update(torch.float32).abs().sum(dim=1) > 0
    assert int(rows.sum()) == groups * width


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("q_prj",), "q_prj: names no matrix of the layers of this model; did you mean q_proj"),
        (("attention", "layers.9.*"), r"layers.9.\*: names no matrix .* choose from all-linear"),
        (
            ("router",),
            r"router: names layers.3.mixer.router, .* --lora-modules-to-save '\*router.w",
        ),
        (("embedding",), r"--lora-modules-to-save '\*embedding.weight'"),
        (("linear_fc1_gate",), "linear_fc1_gate: names no matrix"),  # squared ReLU has no gate
    ],
)
def test_a_word_that_names_nothing_is_refused_with_the_nearest(words, message):
    with pytest.raises(ConfigError, match=message):
        model_of(*words)


GATED = {
    **LLAMA,
    "hybrid_layer_pattern": "G-*-",
    "apply_layernorm_1p": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
}
"""Changes to a model that the family of Qwen3.5 can hold."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("in_proj_qkv", "q_proj"), {"layers.0.mixer.in_proj": 1, "layers.2.mixer.qkv": 1}),
        (("in_proj_b", "in_proj_a", "in_proj_z"), {"layers.0.mixer.in_proj": 3}),
        (("linear_attn.out_proj",), {"layers.0.mixer.out_proj": 1}),
        (("in_proj",), {"layers.0.mixer.in_proj": 4}),
        (
            ("model.layers.0.linear_attn.*",),
            {"layers.0.mixer.in_proj": 4, "layers.0.mixer.out_proj": 1},
        ),
    ],
    ids=str,
)
def test_words_name_matrices_of_a_gated_delta_net(words, expected):
    assert adapted(*words, **GATED) == expected


@pytest.mark.parametrize(
    ("words", "matrices"),
    [
        (("all-linear",), 4),
        (("all-linear", "in_proj_qkvz"), 2),
        (("*.in_proj_ba",), 1),
        (("in_proj_a",), 1),
    ],
    ids=str,
)
def test_a_name_of_a_joined_matrix_chooses_its_family(words, matrices):
    """The model fits Qwen3-Next and Qwen3.5, whose files have other matrices."""
    changes = {**GATED, **QWEN, "hybrid_layer_pattern": "GE*E"}
    changes |= {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}
    assert adapted(*words, **changes)["layers.0.mixer.in_proj"] == matrices


@pytest.mark.parametrize("word", ["embed_tokens", "lm_head"])
def test_tables_of_a_model_without_a_family_are_refused_too(word):
    with pytest.raises(ConfigError, match="which is trained whole or not at all"):
        model_of(word, untie_embeddings_and_output_weights=True)


def test_tables_of_a_family_are_refused_by_their_names():
    with pytest.raises(ConfigError, match="embed_tokens: names embedding, which is trained whole"):
        model_of("embed_tokens", **LLAMA)


def test_kinds_name_their_projections():
    """Each record is a projection of a layer, and each projection of a layer has a record."""
    layers = model_of().layers
    for symbol, kind in KINDS.items():
        layer = layers[MODEL.layer_types.index(symbol)]
        weights = {name for name, _ in layer.mixer.named_parameters() if "lora." in name}
        adapted_paths = {re.sub(r"[._]lora\.[AB]$", "", name) for name in weights}
        assert {projection.path for projection in kind.projections} == adapted_paths


def test_a_part_that_the_pattern_lacks_is_refused_without_a_model():
    with pytest.raises(ConfigError, match=r"mamba: the pattern has no Mamba layer \(M\)"):
        dataclasses.replace(MODEL, lora_rank=2, lora_target_modules=("mamba",), **LLAMA)


def test_saved_weights_are_trained_whole():
    model = model_of("attention", saved=("embedding.*", "*.router.weight", "*norm.weight"))
    whole = {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".lora." not in name
    }
    assert {"embedding.weight", "final_norm.weight", "layers.3.mixer.router.weight"} < whole
    assert all("norm" in name or "router" in name or "embedding" in name for name in whole)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("output.weight", "tied tables have the name embedding.weight"),
        ("lm_head", r"tied tables have the name embedding.weight.*; give 'embedding\.\*'"),
        ("model.embed_tokens", r"give 'embedding\.\*'"),
        ("final_nrm.weight", "did you mean final_norm.weight"),
        ("layers.1.*", "trains layers.1.mixer.proj.weight whole, which also has an adapter"),
    ],
)
def test_saved_weights_that_are_missing_or_adapted_are_refused(saved, message):
    with pytest.raises(ConfigError, match=message):
        model_of(saved=(saved,))


def test_a_table_of_hugging_face_that_is_not_tied_is_named_in_the_refusal():
    with pytest.raises(ConfigError, match=r"lm_head: matches.*; give 'output\.\*'"):
        model_of(saved=("lm_head",), untie_embeddings_and_output_weights=True)


def test_depths_with_the_same_weights_have_the_same_adapter():
    changes = {
        "hybrid_layer_pattern": "*-/*/*",
        "mtp_use_repeated_layer": True,
        "mtp_num_layers": None,
        "num_experts": None,
        "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_enable_expert_bias": False,
    }
    model = model_of(**changes)
    assert model.layers[2].mixer.qkv.lora is model.layers[3].mixer.qkv.lora
    assert model.mtp[0].eh_proj.lora is model.mtp[1].eh_proj.lora
    assert len([name for name, _ in model.named_parameters() if "qkv.lora.A" in name]) == 2


@pytest.mark.parametrize("init", ["kaiming", "xavier", "gaussian"])
def test_initial_values_of_an_adapter(init):
    config = dataclasses.replace(
        MODEL, lora_rank=16, lora_init=init, hidden_size=256, num_attention_heads=4, **LLAMA
    )
    model = HybridModel(config, vocab_size=VOCAB, max_positions=8, device="cpu")
    lora = model.layers[1].mixer.fc1.lora
    spread = lora.A.std().item()
    wanted = {"kaiming": 1 / math.sqrt(3 * 256), "xavier": math.sqrt(2 / 272), "gaussian": 1 / 16}
    assert spread == pytest.approx(wanted[init], rel=0.05)
    assert lora.B.abs().max() == 0
    if init == "kaiming":
        assert lora.A.abs().max() <= 1 / 16


def test_words_may_be_names_in_files_or_in_models_of_transformers():
    """Names in files of Nemotron-H begin with ``backbone``, and those of its models with ``model``."""
    changes = {
        "hybrid_layer_pattern": "M*-",
        **{name: value for name, value in LLAMA.items() if name.startswith(("moe", "mtp", "num"))},
        "position_embedding_type": "none",
    }
    both = [adapted(f"{beginning}.layers.2.*", **changes) for beginning in ("backbone", "model")]
    assert both[0] == both[1] == {"layers.2.mixer.fc1": 1, "layers.2.mixer.fc2": 1}
