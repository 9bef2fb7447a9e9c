"""The complete model: parameter names, precisions, losses, gradients in flat buffers, refusals."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_packed.layers.kinds.attention as attention_kind
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import Axis, ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops.cross_entropy import reference as cross_entropy
from support import hybrid_cases as cases

AUX = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}


def test_names_precisions_and_marks_of_a_bfloat16_model():
    model = cases.tiny_model("M*-E", dtype=torch.bfloat16, **cases.VARIANTS["sigmoid router"])
    parameters = dict(model.named_parameters())
    mamba = [
        "in_proj.weight",
        "conv1d.weight",
        "conv1d.bias",
        "A_log",
        "D",
        "dt_bias",
        "norm.weight",
        "out_proj.weight",
    ]
    moe = [
        "router.weight",
        "experts.fc1",
        "experts.fc2",
        "shared_expert.fc1.weight",
        "shared_expert.fc2.weight",
    ]
    expected = {"embedding.weight", "final_norm.weight", "output.weight"}
    for number, names in enumerate(
        (mamba, ["qkv.weight", "proj.weight"], ["fc1.weight", "fc2.weight"], moe)
    ):
        expected |= {f"layers.{number}.norm.weight"} | {
            f"layers.{number}.mixer.{name}" for name in names
        }
    assert set(parameters) == expected
    float32 = {f"layers.0.mixer.{name}" for name in ("A_log", "D", "dt_bias")} | {
        "layers.3.mixer.router.weight"
    }
    assert {name for name, p in parameters.items() if p.dtype == torch.float32} == float32
    assert {name for name, p in parameters.items() if getattr(p, "keep_fp32", False)} == float32
    undecayed = {name for name, p in parameters.items() if getattr(p, "no_weight_decay", False)}
    norms = {name for name in parameters if name.endswith("norm.weight")}
    assert undecayed == norms | {
        f"layers.0.mixer.{name}" for name in ("A_log", "D", "dt_bias", "conv1d.bias")
    }
    assert set(model.state_dict()) - set(parameters) == {"layers.3.mixer.router.expert_bias"}


def test_output_in_bfloat16_is_float32_where_it_counts():
    model = cases.tiny_model("M*-E", dtype=torch.bfloat16, **AUX)
    output = model(cases.awkward_pack(aux_scale=0.5))
    assert {value.dtype for value in output} == {torch.float32}
    assert (
        output.loss.requires_grad
        and output.loss_sum.requires_grad
        and output.aux_loss.requires_grad
    )
    assert not any(value.requires_grad for value in output[3:])


def test_loss_is_made_of_its_parts():
    model = cases.tiny_model("ME*E", **AUX)
    documents = cases.make_documents(cases.AWKWARD)
    batch = cases.make_pack(documents, tail=4, aux_scale=0.25)
    output = model(batch)
    targets, tokens = cases.count_targets(documents), sum(cases.AWKWARD)
    torch.testing.assert_close(output.loss_sum, output.per_token_loss_T.sum())
    torch.testing.assert_close(output.loss, output.loss_sum / targets + 0.25 * output.aux_loss)
    assert (output.per_token_loss_T != 0).sum() == targets
    assert output.tokens_per_expert.shape == (2, 5)
    assert output.tokens_per_expert.sum(-1).tolist() == [2.0 * tokens] * 2


def test_the_aux_losses_reach_every_layer_below_with_their_own_scale():
    """Without cross-entropy, gradients come from auxiliary losses and are proportional to
    scales[1].
    """
    model = cases.tiny_model("MEE", **AUX)
    documents = [(tokens, 0 * mask) for tokens, mask in cases.make_documents(cases.AWKWARD)]
    by_scale = []
    for scale in (1.0, 2.0):
        model.zero_grad()
        model(cases.make_pack(documents, aux_scale=scale, targets=1)).loss.backward()
        by_scale.append(cases.gradients(model))
    for name in (
        "layers.1.mixer.router.weight",
        "layers.2.mixer.router.weight",
        "layers.0.mixer.A_log",
    ):
        assert by_scale[0][name].abs().max() > 0
        torch.testing.assert_close(by_scale[1][name], 2 * by_scale[0][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["plain", "layer norm, gelu, tied"])
def test_flat_gradients_equal_autograd_over_two_micro_batches(variant, dtype):
    plain = cases.tiny_model("M*-E", dtype=dtype, **AUX, **cases.VARIANTS[variant])
    flat = cases.tiny_model("M*-E", dtype=dtype, **AUX, **cases.VARIANTS[variant])
    buffers = FlatBuffers(flat)
    for seed in range(2):
        batch = cases.awkward_pack(seed, tail=3, aux_scale=0.5)
        expected, output = plain(batch), flat(batch)
        assert torch.equal(expected.loss, output.loss)
        expected.loss.backward()
        output.loss.backward()
    buffers.check_addresses()
    # Autograd rounds each gradient to bfloat16; the flat buffers are float32.
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    expected = cases.gradients(plain)
    for name, parameter in flat.named_parameters():
        assert parameter.grad is None
        error = cases.relative_error(parameter.main_grad, expected[name])
        assert error <= tolerance, f"{name}: {error:.1e}"


def test_evaluation_leaves_the_flat_gradients_alone():
    model = cases.tiny_model("M*-")
    buffers = FlatBuffers(model)
    batch = cases.awkward_pack()
    with torch.no_grad():
        training_mode = model(batch).loss
    model.eval()
    assert torch.equal(model(batch).loss, training_mode)
    assert buffers.grads.abs().max() == 0


PENALTY = 0.25
LOSSES = {
    "divided": (lambda output, model: output.loss / 4, 0.25, 0.0),
    "scaled": (lambda output, model: 1024 * output.loss, 1024.0, 0.0),
    "with a regulariser": (lambda output, model: output.loss + penalty(model), 1.0, PENALTY),
    "used twice": (lambda output, model: torch.stack([output.loss, output.loss]).mean(), 1.0, 0.0),
    "its parts": (
        lambda output, model: 3 * (output.loss_sum / TARGETS + 0.5 * output.aux_loss),
        3.0,
        0.0,
    ),
}
"""For each name: a loss computed from the output, the factor of the gradients of ``output.loss`` in
its gradients, and the factor of the penalty's gradients.
"""
DOCUMENTS = cases.make_documents(cases.AWKWARD)
TARGETS = cases.count_targets(DOCUMENTS)


def penalty(model):
    return PENALTY * sum(parameter.square().sum() for parameter in model.parameters()) / 2


def gradients_of(model, run):
    """Return the gradients that ``run`` adds to flat buffers that are not zero before."""
    buffers, before = FlatBuffers(model), 2.0**-8
    buffers.grads.fill_(before)
    run(model)
    return {name: parameter.main_grad - before for name, parameter in buffers.parameters.items()}


@pytest.mark.parametrize("variant", ["plain", "layer norm, gelu, tied"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_may_be_scaled_added_to_and_divided_before_backward(loss, variant):
    function, factor, penalty_factor = LOSSES[loss]
    batch = cases.make_pack(DOCUMENTS, tail=3, aux_scale=0.5)
    plain, flat = (cases.tiny_model("M*-E", **AUX, **cases.VARIANTS[variant]) for _ in range(2))
    plain(batch).loss.backward()
    found = gradients_of(flat, lambda model: function(model(batch), model).backward())
    for name, parameter in plain.named_parameters():
        expected = factor * parameter.grad + penalty_factor * parameter.detach()
        error = cases.relative_error(found[name], expected)
        assert error <= 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("tied", ["plain", "layer norm, gelu, tied"])
def test_a_forward_pass_without_backward_adds_no_gradient(tied):
    batches = [cases.awkward_pack(seed, aux_scale=0.5) for seed in range(2)]
    expected, found = (
        gradients_of(cases.tiny_model("M*-E", **AUX, **cases.VARIANTS[tied]), run)
        for run in (
            lambda model: model(batches[1]).loss.backward(),
            lambda model: [model(batch) for batch in batches][1].loss.backward(),
        )
    )
    nothing = gradients_of(
        cases.tiny_model("M*-E", **AUX, **cases.VARIANTS[tied]), lambda model: model(batches[0])
    )
    for name in expected:
        assert expected[name].any() and torch.equal(found[name], expected[name]), name
        assert not nothing[name].any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", ["plain", "layer norm, gelu, tied"])
def test_forward_backward_gives_the_bits_of_forward_and_backward_in_one_pass_over_the_logits(
    variant, dtype, monkeypatch
):
    chunks = []
    step = cross_entropy.softmax_step
    monkeypatch.setattr(
        cross_entropy, "softmax_step", lambda *arguments: chunks.append(1) or step(*arguments)
    )
    batches = [cases.awkward_pack(n, tail=3, aux_scale=0.5) for n in range(2)]

    def backward(model, batch):
        output = model(batch)
        output.loss.backward()
        return output

    found, outputs, passes = [], ([], []), []
    for run, kept in zip((backward, HybridModel.forward_backward), outputs):
        model = cases.tiny_model("M*-E", dtype=dtype, **AUX, **cases.VARIANTS[variant])
        chunks.clear()
        found.append(
            gradients_of(
                model, lambda model, run=run, kept=kept: kept.extend(run(model, b) for b in batches)
            )
        )
        passes.append(len(chunks))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert passes == [8, 4]  # two packs of two chunks; ``backward`` computes logits twice
    for separate, together in zip(*outputs):
        assert not any(value.requires_grad for value in together)
        assert all(torch.equal(*both) for both in zip(separate, together))


def test_forward_backward_without_flat_buffers_and_in_evaluation_mode():
    batch = cases.make_pack(DOCUMENTS, aux_scale=0.5)
    for training in (True, False):
        models = [cases.tiny_model("M*-E", **AUX).train(training) for _ in range(2)]
        models[0](batch).loss.backward()
        models[1].forward_backward(batch)
        for name, gradient in cases.gradients(models[0]).items():
            assert torch.equal(cases.gradients(models[1])[name], gradient), name


@pytest.mark.parametrize(
    "run",
    [HybridModel.forward_backward, lambda model, batch: (model(batch).loss / 2).backward()],
    ids=["forward_backward", "forward and backward"],
)
def test_no_pass_makes_a_second_buffer_of_the_output_weights_size(run):
    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            results = operation(*args, **kwargs or {})
            for result in results if isinstance(results, (tuple, list)) else [results]:
                if (
                    isinstance(result, torch.Tensor)
                    and result.untyped_storage().data_ptr() not in known
                ):
                    sizes.append(result.untyped_storage().nbytes())
            return results

    model = cases.tiny_model("-", make_vocab_size_divisible_by=4096)
    buffers = FlatBuffers(model)
    batch, sizes = cases.make_pack([(np.arange(9), np.ones(9))]), []
    known = {
        t.untyped_storage().data_ptr() for t in (*model.parameters(), buffers.storage, batch.buffer)
    }
    with Allocations():
        run(model, batch)
    # The largest buffer has the logits of one chunk.
    assert max(sizes) == 5 * 4096 * 4 < model.output_weight.numel() * 4
    assert buffers.parameters["output.weight"].main_grad.any()


def test_tables_are_built_once_for_all_layers(monkeypatch):
    calls = []
    build = attention_kind.prepare_tables
    monkeypatch.setattr(
        attention_kind, "prepare_tables", lambda *args, **kw: calls.append(1) or build(*args, **kw)
    )
    model = cases.tiny_model("*M" * 8)
    batch = cases.awkward_pack()
    model(batch)
    assert len(calls) == 1
    packed = model.prepare(batch.packed)
    assert model.prepare(packed) is packed
    assert len(calls) == 2


def test_rows_that_pad_the_vocabulary_take_no_part():
    model = cases.tiny_model("-")
    assert model.output_weight.shape[0] == 64 > cases.VOCAB
    batch = cases.awkward_pack()
    before = model(batch)
    before.loss.backward()
    assert model.output_weight.grad[cases.VOCAB :].abs().max() == 0
    with torch.no_grad():
        model.output_weight[cases.VOCAB :] = 1e3
    assert torch.equal(model(batch).loss, before.loss)
    assert model.logits(batch.tokens, batch.packed).shape == (sum(cases.AWKWARD), cases.VOCAB)


def test_tied_and_untied_output():
    tied = cases.tiny_model("-", untie_embeddings_and_output_weights=False)
    untied = cases.tiny_model("-")
    assert tied.output_weight is tied.embedding.weight
    assert "output.weight" not in dict(tied.named_parameters())
    assert untied.num_parameters - tied.num_parameters == 64 * 32


def test_norms_have_the_epsilons_of_the_options():
    changes = {"norm_epsilon": 0.25, "mamba_norm_epsilon": 0.5, "qk_layernorm": True}
    for own, used in ((None, 0.25), (0.125, 0.125)):
        model = cases.tiny_model("M*G", linear_norm_epsilon=own, **changes)
        found = {name: part.eps for name, part in model.named_modules() if hasattr(part, "eps")}
        expected = dict.fromkeys(found, 0.25)
        assert found == expected | {"layers.0.mixer.norm": 0.5, "layers.2.mixer.norm": used}


def test_convolution_has_a_bias_unless_it_is_switched_off():
    for bias in (True, False):
        names = dict(cases.tiny_model("M", mamba_conv_bias=bias).named_parameters())
        assert ("layers.0.mixer.conv1d.bias" in names) == bias


def test_dropout_acts_in_training_only():
    model = cases.tiny_model("M*-E", hidden_dropout=0.5)
    batch = cases.awkward_pack()
    torch.manual_seed(0)
    first, second = model(batch).loss, model(batch).loss
    assert first != second
    model.eval()
    assert torch.equal(model(batch).loss, model(batch).loss)


def test_expert_biases_of_all_layers_follow_the_counts():
    model = cases.tiny_model(
        "EE", moe_router_bias_update_rate=0.5, **cases.VARIANTS["sigmoid router"]
    )
    before = [layer.mixer.router.expert_bias.clone() for layer in model.moe_layers]
    counts = torch.tensor([[9.0, 1, 5, 5, 5], [1, 1, 1, 1, 21]])
    model.update_expert_bias(counts.reshape(-1), skip=torch.tensor(True))
    assert all(
        torch.equal(layer.mixer.router.expert_bias, b) for layer, b in zip(model.moe_layers, before)
    )
    model.update_expert_bias(counts.reshape(-1), skip=torch.tensor(False))
    moved = [layer.mixer.router.expert_bias - b for layer, b in zip(model.moe_layers, before)]
    torch.testing.assert_close(moved[0], torch.tensor([-0.5, 0.5, 0, 0, 0]))
    torch.testing.assert_close(moved[1], torch.tensor([0.5, 0.5, 0.5, 0.5, -0.5]))


def test_expert_bias_update_is_nothing_without_biases():
    cases.tiny_model("E").update_expert_bias(torch.ones(5))
    cases.tiny_model("M").update_expert_bias(torch.ones(0))


def test_a_forced_backend_reaches_its_op():
    from megatron_packed.ops.backend_dispatch import NoBackendError

    batch = cases.awkward_pack()
    for pattern, op in {
        "*": "varlen_attention",
        "M": "ssd",
        "G": "gated_delta_rule",
        "-": "activation",
        "E": "grouped_mlp",
    }.items():
        model = cases.tiny_model(pattern, backends={op: "no such kernel"})
        with pytest.raises(NoBackendError, match=f"{op} has no backend 'no such kernel'"):
            model(batch)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"ep": Axis(size=2)}, r"ep_size \(2\) does not fit the number of experts \(5\)"),
        (
            {"tp": Axis(size=3), "expert_tp": Axis(size=3)},
            r"tp_size \(3\) does not fit the number of inner channels of an MLP",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_refused(axes, message):
    groups = ParallelGroups(device=torch.device("cpu"), **axes)
    with pytest.raises(ValueError, match=message):
        HybridModel(cases.tiny_config("E"), vocab_size=10, max_positions=8, groups=groups)
