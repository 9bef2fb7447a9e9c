"""Facts of a Hugging Face model that an export with a new config.json repeats."""

import json
import shlex

import pytest

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import newest_checkpoint
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.original_facts import facts_problem, read_facts
from megatron_packed.checkpoint.run_metadata import metadata_problem
from megatron_packed.cli.export_trained import export_trained
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.models.convert.import_huggingface import from_huggingface
from megatron_packed.training.from_python import train
from support.converted_model import to_hf, write_model
from support.data_helpers import byte_level, save_tokenizer

TOKENS = ByteTokenizer.vocab_size
FIELDS = {
    "vocab_size": TOKENS,
    "max_position_embeddings": 262144,
    "bos_token_id": 3,
    "eos_token_id": 5,
    "pad_token_id": 4,
    "tie_word_embeddings": True,
}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
SAMPLING |= {"repetition_penalty": 1.05, "max_new_tokens": 2048, "output_attentions": False}
GENERATION = {**SAMPLING, "bos_token_id": 3, "eos_token_id": [5, 6], "pad_token_id": 4}
RUN = """--seq-length 128 --lr 1e-3 --global-batch-size 2 --no-isolation-self-test --device cpu
    --train-iters 1 --log-interval 1"""
ENDS = sorted(ByteTokenizer.special_tokens.values())


def written(folder, generation=GENERATION, **changes):
    """Write a Llama model with these facts and return its folder."""
    write_model(folder, "llama", **{**FIELDS, **changes})
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def exported(checkpoints, folder, **options):
    """Export a checkpoint; return config.json, generation_config.json and the result."""
    result = export_trained(checkpoints, folder, **options)
    names = ("config.json", "generation_config.json")
    return *(json.loads((folder / name).read_text()) for name in names), result


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Checkpoint of converted weights."""
    folder = tmp_path_factory.mktemp("converted")
    from_huggingface(written(folder / "hf"), folder / "weights")
    return folder / "weights"


def trained(weights, folder, data, *more):
    """Train from ``weights`` for a step, and return the folder of checkpoints."""
    model = [word for line in (weights / "model.args").open() for word in shlex.split(line)]
    argv = [*model, *RUN.split(), "--data-path", str(data), "--save", str(folder), *more]
    train(argv)
    return folder


def test_converted_weights_come_back_with_the_facts_of_the_original(weights, tmp_path):
    config, generation, result = exported(weights, tmp_path / "hf")
    assert {key: config[key] for key in FIELDS} == FIELDS
    assert generation == GENERATION and result.positions == ""
    # The rotary tables of a run keep the length of its documents.
    assert "--max-position-embeddings" not in (weights / "model.args").read_text()


def test_transformers_reads_the_facts(weights, tmp_path):
    transformers = pytest.importorskip("transformers")
    export_trained(weights, tmp_path / "hf")
    read = transformers.GenerationConfig.from_pretrained(tmp_path / "hf").to_dict()
    assert {key: read[key] for key in GENERATION} == GENERATION
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.max_position_embeddings, config.bos_token_id) == (262144, 3)


def test_runs_carry_the_facts_to_their_checkpoints(weights, data, tmp_path):
    """Facts survive fine-tuning, a resume, a phase, and another fine-tuning of the result."""
    run, again = tmp_path / "run", tmp_path / "again"
    trained(weights, run, data, "--sft", "--pretrained-checkpoint", str(weights))
    trained(weights, run, data, "--sft", "--load", str(run), "--train-iters", "2")
    more = ["--begin-phase", "b", "--train-iters", "3"]
    trained(weights, run, data, "--sft", "--load", str(run), *more)
    trained(weights, again, data, "--sft", "--load", str(run), "--finetune")
    for number, checkpoints in enumerate((run, again)):
        config, generation, _ = exported(checkpoints, tmp_path / f"hf{number}")
        assert (config["max_position_embeddings"], config["bos_token_id"]) == (262144, 3)
        assert {key: generation[key] for key in SAMPLING} == SAMPLING
        # The ends of the training's answers replace those of the original.
        assert set(config["eos_token_id"]) <= set(ENDS) and not {5, 6} & set(config["eos_token_id"])
        assert generation["eos_token_id"] == config["eos_token_id"]


def test_a_training_on_text_adds_its_end_to_the_ends_of_the_original(weights, data, tmp_path):
    """Plain text decides no end of answers, so a chat model still stops where it did."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "Once upon a time."}\n' * 20)
    run = trained(weights, tmp_path / "run", text, "--pretrained-checkpoint", str(weights))
    config, generation, _ = exported(run, tmp_path / "hf")
    assert config["eos_token_id"] == [ByteTokenizer().eod_id, 5]
    assert generation["eos_token_id"] == [ByteTokenizer().eod_id, 5, 6]


def test_a_tokenizer_of_the_training_data_drops_the_token_numbers(weights, data, tmp_path):
    more = ["--tokenizer-type", "TrainedBPETokenizer", "--tokenizer-vocab-size", "260", "--sft"]
    more += ["--pretrained-checkpoint", str(weights)]
    run = trained(weights, tmp_path / "run", data, *more)
    config, generation, _ = exported(run, tmp_path / "hf")
    assert config.get("bos_token_id") is None and "bos_token_id" not in generation
    assert config["max_position_embeddings"] == 262144 and generation["top_k"] == 20


def test_only_the_tokenizer_of_the_original_keeps_its_token_numbers(data, tmp_path):
    """A conversion stores the hash of the tokenizer next to the weights."""
    model, weights = written(tmp_path / "model", vocab_size=400), tmp_path / "weights"
    save_tokenizer(model, byte_level(), eos_token="</s>")
    save_tokenizer(tmp_path / "other", byte_level(corpus=["quite another text"]), eos_token="</s>")
    assert from_huggingface(model, weights).notes == ()
    for path, bos in ((model, 3), (tmp_path / "other", None)):
        folder = tmp_path / f"hf {path.name}"
        config, generation, result = exported(weights, folder, tokenizer=str(path))
        assert (config.get("bos_token_id"), generation.get("bos_token_id")) == (bos, bos)
        assert (result.warning is None) == (bos == 3)
        assert config["max_position_embeddings"] == 262144 and generation["top_k"] == 20
    # Checkpoints of a run have the hash of the run's tokenizer, and keep that of the original.
    more = ["--tokenizer-model", str(tmp_path / "other"), "--pretrained-checkpoint", str(weights)]
    run = trained(weights, tmp_path / "run", data, "--sft", *more)
    config, _, result = exported(run, tmp_path / "hf")
    assert config.get("bos_token_id") is None and result.warning is None


def test_a_tokenizer_that_does_not_fit_the_weights_is_reported(tmp_path):
    model = written(tmp_path / "model")
    save_tokenizer(model, byte_level(), eos_token="</s>")
    [note] = from_huggingface(model, tmp_path / "weights").notes
    assert note.startswith("No run can use this tokenizer with these weights: --vocab-size 26")
    (model / "tokenizer.json").write_text("{}")
    [note] = from_huggingface(model, tmp_path / "damaged").notes
    assert "tokenizer.json is not a tokenizer.json" in note
    metadata = read_manifest(newest_checkpoint(tmp_path / "damaged")).metadata
    assert "tokenizer_hash" not in {**metadata, **metadata["original"]}


def test_the_length_that_a_run_names_counts(data, tmp_path, capsys):
    """Longer documents alone do not raise the length; the export reports them."""
    from_huggingface(written(tmp_path / "hf", max_position_embeddings=64), tmp_path / "weights")
    weights = tmp_path / "weights"
    more = ["--sft", "--pretrained-checkpoint", str(weights)]
    plain = trained(weights, tmp_path / "plain", data, *more)
    assert to_hf(tmp_path / "a", plain) == 0
    said = "max_position_embeddings is 64, as in the original, but documents of the training may"
    assert f"{said} have 128 tokens (--max-document-length)" in capsys.readouterr().out
    more += ["--max-position-embeddings", "512"]
    named = trained(weights, tmp_path / "named", data, *more)
    config, _, result = exported(named, tmp_path / "b")
    assert (config["max_position_embeddings"], result.positions) == (512, "")


def test_keys_that_the_original_lacks_stay_missing(tmp_path):
    """transformers then takes the defaults of the family, as for the original."""
    write_model(tmp_path / "hf", "llama", vocab_size=TOKENS, bos_token_id=None)
    from_huggingface(tmp_path / "hf", tmp_path / "weights")
    config, generation, _ = exported(tmp_path / "weights", tmp_path / "back")
    assert "max_position_embeddings" not in config and "pad_token_id" not in config
    assert config["bos_token_id"] is None and generation == {"do_sample": False}


def test_facts_of_a_text_model_inside_a_file_with_vision(tmp_path):
    """Keys of ``text_config`` count before those outside."""
    outer = {"bos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 7}
    fields = {**outer, "text_config": {"bos_token_id": 3, "max_position_embeddings": 64}}
    facts, left_out = read_facts(tmp_path / "config.json", fields)
    assert facts == {
        "config": {"bos_token_id": 3, "pad_token_id": 2, "max_position_embeddings": 64}
    }
    assert left_out == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"top_k": 2.5}, "top_k is 2.5, but must be a whole number"),
        ({"temperature": "0.7"}, "temperature is '0.7', but must be a number"),
        ({"do_sample": 1}, "do_sample is 1, but must be true or false"),
        ({"eos_token_id": [5, "x"]}, "eos_token_id is [5, 'x'], but must be a token number or"),
        ({"bos_token_id": 2**31}, "bos_token_id is 2147483648, but must be a token number"),
    ],
)
def test_a_wrong_type_is_refused_before_a_folder_is_made(change, sentence, tmp_path):
    folder = written(tmp_path / "hf", {**GENERATION, **change})
    with pytest.raises(CheckpointError) as refused:
        from_huggingface(folder, tmp_path / "weights")
    assert sentence in str(refused.value) and "generation_config.json" in str(refused.value)
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("target", ["../blobs/lost", "generation_config.json", "/dev/null"])
def test_a_broken_link_is_not_a_missing_file(target, tmp_path):
    """The cache of the Hub consists of links, and an interrupted download leaves broken ones."""
    folder = written(tmp_path / "hf", GENERATION)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"(lost|generation_config.json|/dev/null): "):
        from_huggingface(folder, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_a_length_of_a_wrong_type_is_refused(tmp_path):
    folder = written(tmp_path / "hf", max_position_embeddings="128")
    with pytest.raises(CheckpointError, match="max_position_embeddings is '128', but must be"):
        from_huggingface(folder, tmp_path / "weights")


def test_keys_that_are_not_kept_are_reported(tmp_path):
    more = {"suppress_tokens": [7], "transformers_version": "5.24.0", "forced_eos_token_id": None}
    done = from_huggingface(written(tmp_path / "hf", {**GENERATION, **more}), tmp_path / "weights")
    [note] = done.notes
    assert note.startswith(
        "The checkpoint does not keep these keys of generation_config.json: suppress_tokens."
    )


def test_forged_facts_are_refused_with_their_place(weights):
    metadata = read_manifest(newest_checkpoint(weights)).metadata
    assert metadata_problem(metadata) is None
    forged = {**metadata, "original": {"generation": {"top_p": "1"}}}
    assert "original.generation.top_p is '1', but must be a number" in metadata_problem(forged)
    for value in (
        [],
        {"other": {}},
        {"tokenizer_hash": 1},
        {"config": []},
        {"config": {"top_k": 3}},
    ):
        assert facts_problem(value) is not None
