"""Export of models that were trained from scratch: transformers computes the same with them."""

import numpy as np
import pytest
import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import MANIFEST
from megatron_packed.checkpoint.sealed_json import seal, unseal
from megatron_packed.cli.export_trained import export_trained
from megatron_packed.cli.main import main
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.exported_files import files_of_bytes, files_of_gpt2
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.models.convert.families.registry import FAMILIES
from megatron_packed.models.convert.huggingface_files import SINGLE, ModelFiles
from megatron_packed.models.convert.import_huggingface import open_model
from megatron_packed.models.convert.trained_config import SpecialIds, family_for, obstacles
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from support import hybrid_cases as cases
from support.attached_files import remove_attached_files
from support.converted_model import (
    assert_same,
    contents,
    from_hf,
    opened,
    to_hf,
    write_model,
    write_tensors,
)
from support.data_helpers import AWKWARD, byte_level
from support.family_models import COMMON, MAMBA, MODELS, ROPE

TOLERANCE = 1e-4


def trained(folder, data, flags, *more):
    """Train a model and return its folder."""
    argv = ["--hybrid-layer-pattern", *flags.split(), *COMMON.split(), *more]
    train([*argv, "--data-path", str(data), "--save", str(folder)])
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_logits_of_the_pack(name, data, tmp_path, capsys):
    """Each document alone in transformers has the logits that it has in a pack of the run's model.

    The tokenizer of the folder gives the tokens of the run.
    """
    transformers = pytest.importorskip("transformers")
    from support.huggingface_models import computes_wrong_groups

    folder, hf = tmp_path / "run", tmp_path / "hf"
    more = ["--train-iters", "2", "--init-method-std", "0.2"]
    trained(folder, data, MODELS[name], *more)
    family, _, how = name.partition(", ")
    given = ["--hf-family", family] if how == "given" else []
    assert to_hf(hf, folder, *given) == 0
    assert f"written as a {family} model" in capsys.readouterr().out
    run = TrainedModel.load(folder, device="cpu")
    ours, text = run.model, "What is 23?"
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded == run.tokenizer.encode(text).tolist()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf).eval()
    assert theirs.dtype == torch.float32 and theirs.config.model_type == family
    if computes_wrong_groups(theirs):
        pytest.skip("this version of transformers computes wrong logits of several groups")
    documents = cases.make_documents(cases.AWKWARD)
    batch = cases.make_pack(documents, tail=5, spare=3)
    logits = ours.logits(batch.tokens, batch.packed)
    for number, (tokens, _) in enumerate(documents):
        with torch.no_grad():
            expected = theirs(input_ids=torch.as_tensor(tokens)[None], use_cache=False).logits[0]
        found = logits[batch.packed.seq_idx[0] == number]
        assert (found - expected).abs().max() <= TOLERANCE, f"document of {len(tokens)} tokens"
        assert torch.equal(found.argmax(-1), expected.argmax(-1))

    model, tensors = opened(hf, depths=ours.config.mtp_depths)
    back = HybridModel(model, vocab_size=model.vocab_size, max_positions=256)
    missing, extra = back.load_state_dict(tensors, strict=False)
    # Depths that share weights have them once.
    assert not extra and (not missing or model.mtp_use_repeated_layer)
    before, after = ours.state_dict(), back.state_dict()
    assert before.keys() <= after.keys()
    for key, value in after.items():
        rows = slice(None, model.vocab_size) if value.shape[0] == 384 else slice(None)
        expected = before.get(key, torch.zeros(()).expand_as(value))
        assert torch.equal(value[rows], expected[rows]), key


def test_transformers_gives_the_same_answer_and_stops(data, tmp_path, capsys):
    """A question, formatted by the exported template, gets the run's answer, which then ends."""
    transformers = pytest.importorskip("transformers")
    folder, hf = tmp_path / "run", tmp_path / "hf"
    more = ["--tokenizer-type", "TrainedBPETokenizer", "--tokenizer-vocab-size", "280"]
    trained(folder, data, f"M*-M {MAMBA}", *more, "--train-iters", "25")
    ends = export_trained(folder, hf).ends
    assert all(end in ByteTokenizer.special_tokens for end in ends)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 23?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf)
    [tokens] = theirs.generate(**prompt, max_new_tokens=40)[:, prompt["input_ids"].shape[1] :]
    ours = TrainedModel.load(folder, device="cpu").generate("What is 23?", max_new_tokens=40)
    assert len(tokens) < 40 and tokenizer.decode(tokens[-1:]) in ends
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == ours != ""
    with pytest.raises(CheckpointError, match="is not empty"):
        export_trained(folder, hf)
    for step, sentence in ((7, "no checkpoint of step 7"), ("best", "names a best validation")):
        with pytest.raises(CheckpointError, match=sentence):
            export_trained(folder, tmp_path / "other", step=step)
    moved = export_trained(folder, tmp_path / "other", step=25, tokenizer=str(hf))
    assert moved.ends == ends
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "other" / name).read_bytes() == (hf / name).read_bytes()


def test_a_tokenizer_of_the_training_share_is_found_and_exported(data, tmp_path):
    """With ``--split`` the vocabulary was learned from a share of the data, which finds it again."""
    more = ["--tokenizer-type", "TrainedBPETokenizer", "--tokenizer-vocab-size", "290"]
    cache = tmp_path / "cache"
    more += ["--split", "8,2", "--data-cache-path", str(cache), "--train-iters", "1"]
    folder = trained(tmp_path / "run", data, f"M*- {MAMBA}", *more)
    export_trained(folder, tmp_path / "hf")
    [learned] = cache.glob("tokenizer-*/tokenizer.json")
    ours, theirs = HuggingFaceTokenizer(learned), HuggingFaceTokenizer(tmp_path / "hf")
    for text in (*AWKWARD, "What is 23?"):
        assert np.array_equal(ours.encode(text), theirs.encode(text))
    assert TrainedModel.load(folder, device="cpu").tokenizer.vocab_size == ours.vocab_size
    cache.rename(tmp_path / "deleted")
    export_trained(folder, tmp_path / "without cache")  # the tokenizer is in the checkpoint
    for file in (tmp_path / "hf").iterdir():
        assert (tmp_path / "without cache" / file.name).read_bytes() == file.read_bytes()
    remove_attached_files(folder)
    with pytest.raises(
        DataError, match="`megatron-packed packing` with the flags of the run trains"
    ):
        export_trained(folder, tmp_path / "other")


def test_a_model_without_a_family_is_refused_with_each_option():
    """Options that no family has are listed by family, the nearest family first."""
    model = ModelConfig(
        hybrid_layer_pattern="M*-", hidden_size=256, num_attention_heads=4, norm_epsilon=1e-6
    )
    with pytest.raises(CheckpointError) as refused:
        family_for(model)
    sentence = str(refused.value)
    assert (
        "nemotron_h cannot express --mamba-norm-epsilon 1e-05 (the family has --mamba-norm-epsilon "
        "1e-06); --squared-relu off (the family has --squared-relu on); --disable-bias-linear off "
        "(the family has --disable-bias-linear on); --normalization LayerNorm (the family has "
        "--normalization RMSNorm). "
    ) in sentence
    assert "mamba2 cannot express --hybrid-layer-pattern M*- (the family repeats M and" in sentence
    assert sentence.count("cannot express") == 3
    with pytest.raises(CheckpointError, match="a model without --moe-shared-expert-intermediate"):
        family_for(
            ModelConfig(
                hybrid_layer_pattern="ME",
                hidden_size=256,
                num_experts=4,
                moe_router_score_function="sigmoid",
                squared_relu=True,
                add_bias_linear=False,
                normalization="RMSNorm",
            )
        )
    with pytest.raises(CheckpointError, match="mixtral cannot express"):
        family_for(model, "mixtral")


def options(**changes):
    """Return the options of a model that Qwen3 can hold."""
    same = {
        "hybrid_layer_pattern": "*-*-*-",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "swiglu": True,
        "position_embedding_type": "rope",
        "qk_layernorm": True,
    }
    return ModelConfig(**same | changes)


def test_options_that_mean_the_same_as_none_are_left_out():
    """A factor of 1, the usual scale of scores, and a list of windows with other entries."""
    same = {"logits_scaling": 1.0, "softmax_scale": 8**-0.5, "rope_scaling_factor": 3.0}
    assert obstacles(FAMILIES["qwen3"], options(**same)) == []
    family, model = family_for(options(window_size="4,0", window_attn_skip_freq="[1,0,1,1,0,1]"))
    assert family.model_type == "qwen3" and model.window_attn_skip_freq == "[1]*4+[0]*2"


def test_windows_that_a_family_lacks_are_named():
    some = options(window_size="4,0", window_attn_skip_freq="[1]*4+[0]*2", qk_layernorm=False)
    assert obstacles(FAMILIES["mistral"], some) == [
        "--window-size 4,0 (the family has no --window-size)",
        "--window-attn-skip-freq [1]*4+[0]*2 (the family has no --window-attn-skip-freq)",
    ]
    assert "--window-size 4,0 (the family has no --window-size)" in obstacles(
        FAMILIES["llama"], some
    )


def test_sizes_that_transformers_refuses_are_named():
    """OLMo Hybrid needs both kinds of layers, and Mamba-2 a whole multiple of the hidden size."""
    only = options(qk_layernorm_scope="all_heads", attention_norm_placement="output")
    assert "a model without gated-delta-net layers" in obstacles(FAMILIES["olmo_hybrid"], only)
    narrow = ModelConfig(
        hybrid_layer_pattern="M",
        hidden_size=32,
        mamba_num_heads=3,
        mamba_num_groups=1,
        mamba_head_dim=16,
        normalization="RMSNorm",
    )
    [found] = obstacles(FAMILIES["mamba2"], narrow)
    assert found.startswith("--mamba-num-heads 3 (the family has a multiple")


def test_ends_of_answers_as_transformers_takes_them():
    """One end is a number, several are a list, and unknown ends are null."""
    for ends, expected in (((), None), ((7,), 7), ((7, 2), [7, 2])):
        assert SpecialIds(ends=ends).fields()["eos_token_id"] == expected


def test_an_exported_byte_tokenizer_encodes_like_the_original(tmp_path):
    """A byte tokenizer and its tokenizer.json give the same tokens and the same text."""
    ours = ByteTokenizer()
    for name, text in files_of_bytes(ours, None).items():
        (tmp_path / name).write_text(text)
    theirs = HuggingFaceTokenizer(tmp_path)
    assert (theirs.vocab_size, theirs.eod_id, theirs.pad_id) == (260, ours.eod_id, ours.pad_id)
    for text in AWKWARD:
        for special in (False, True):
            tokens = ours.encode(text, special=special)
            assert np.array_equal(theirs.encode(text, special=special), tokens)
            assert theirs.decode(tokens) == ours.decode(tokens)


def test_a_model_with_token_numbers_for_text_is_exported_without_a_tokenizer(tmp_path):
    (tmp_path / "numbers.jsonl").write_text('{"text": "3 1 4 1 5"}\n' * 4)
    sizes = COMMON.replace("--sft", "--tokenizer-type NullTokenizer --vocab-size 9").split()
    data = ["--data-path", str(tmp_path / "numbers.jsonl"), "--train-iters", "1"]
    model = ["--hybrid-layer-pattern", "*-", *ROPE.split(), "--save", str(tmp_path / "run")]
    train([*sizes, *data, *model])
    exported = export_trained(tmp_path / "run", tmp_path / "hf")
    assert (exported.ends, exported.missing[:15]) == (("8",), "A NullTokenizer")
    files = {path.name for path in (tmp_path / "hf").iterdir()}
    assert files == {"config.json", "generation_config.json", SINGLE}


def test_an_exported_gpt2_tokenizer_is_read_by_transformers(tmp_path):
    """transformers reads the two files and the settings, with the chat template."""
    transformers = pytest.importorskip("transformers")
    byte_level(("<|endoftext|>",)).model.save(str(tmp_path))
    files = files_of_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt", "{{ messages }}")
    (tmp_path / "tokenizer_config.json").write_text(files["tokenizer_config.json"])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = HuggingFaceTokenizer.gpt2(files["vocab.json"], files["merges.txt"])
    assert theirs.encode("Hello there.") == ours.encode("Hello there.").tolist()
    assert theirs.eos_token_id == ours.eod_id and theirs.chat_template == "{{ messages }}"


def test_files_with_both_tables_of_a_tied_model_are_read_and_written(tmp_path):
    """Equal tables count as one, and an export has both; tables that differ are refused."""
    model, weights, hf = (tmp_path / name for name in ("model", "weights", "hf"))
    model.mkdir()
    tables = write_model(model, tie_word_embeddings=True, max_file_bytes=10**9)
    table = tables["backbone.embeddings.weight"]
    for copy, fits in ((table, True), (table + 1, False)):
        both = {**tables, "lm_head.weight": copy}
        write_tensors(model, both)
        assert "lm_head.weight" in ModelFiles(model).places
        if fits:
            assert "lm_head.weight" not in open_model(model, bf16=False)[1].places
            assert from_hf(model, weights) == 0
            assert to_hf(hf, weights, "--hf-base", model) == 0
            assert_same(contents(hf), both)
        else:
            with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from backbone"):
                open_model(model, bf16=False)


@pytest.mark.parametrize("way", ["--to-hf", "--to-megatron"])
def test_an_unknown_option_of_the_checkpoint_is_one_sentence(way, data, tmp_path, capsys):
    """A kind of layer whose files are gone, or a newer version, leaves such options."""
    folder = trained(tmp_path / "run", data, f"M {MAMBA}", "--train-iters", "1")
    for path in folder.glob(f"step_*/{MANIFEST}"):
        fields = unseal(path.read_bytes(), path)
        fields["metadata"]["config"]["model"]["option_of_others"] = 1
        path.write_bytes(seal(fields))
    capsys.readouterr()
    assert main(["convert", way, str(tmp_path / "out"), "--load", str(folder)]) == 4
    said = capsys.readouterr().err
    assert "option_of_others" in said or "option-of-others" in said
    assert "Traceback" not in said and not (tmp_path / "out").exists()
