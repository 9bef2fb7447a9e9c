"""A whole run from Python: what it returns and raises, and what its callback receives."""

import inspect
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_packed.checkpoint.errors import NoCheckpointError
from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config import launch_checks
from megatron_packed.config.environment_variables import DETERMINISTIC, environment
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.parser.precedence import _keywords
from megatron_packed.config.run import RunConfig
from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import END_OF_DOCUMENT
from megatron_packed.inputs.prompts import encode_prompts, texts
from megatron_packed.models.convert.import_huggingface import from_huggingface
from megatron_packed.models.generate import generate
from megatron_packed.reporting.run_writers import CallbackWriter, writers_of
from megatron_packed.training import pretrain
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from support.converted_model import write_model
from support.data_helpers import byte_level, conversation, save_tokenizer
from support.json_lines import read_json, read_lines, write_texts

MODEL = "--hybrid-layer-pattern M*- --hidden-size 16 --num-attention-heads 2 --mamba-head-dim 8"
MODEL += " --mamba-num-groups 1 --mamba-state-dim 8 --no-isolation-self-test --seq-length 64"


@pytest.fixture
def flags(tmp_path):
    """Flags of a run of three steps that saves and logs in its folder."""
    data = tmp_path / "documents.jsonl"
    write_texts(data, (f"{n:02d} hello" for n in range(40)))
    folder = tmp_path / "run"
    places = ["--data-path", data, "--save", folder, "--load", folder]
    log = ["--log-jsonl", tmp_path / "log.jsonl"]
    return [*MODEL.split(), *map(str, places + log), "--lr", "1e-2", "--train-iters", "3"]


def test_the_callback_receives_every_line_of_the_log(flags, tmp_path, capsys):
    """The callback gets the records in order, each after its line is in the log.

    A second run in the same process resumes.
    """
    seen = []

    def callback(record):
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["lm_loss"] == record["lm_loss"]
        seen.append((record["iteration"], record["lm_loss"]))
        record.clear()  # the record is a copy, so clearing it affects nothing else

    assert train(flags, callback) is ExitCode.DONE
    assert [iteration for iteration, _ in seen] == [1, 2, 3]
    assert train([*flags, "--train-iters", "5"], callback) is ExitCode.DONE
    assert [iteration for iteration, _ in seen] == [1, 2, 3, 4, 5]
    assert "resuming from" in capsys.readouterr().out
    status = read_json(tmp_path / "run" / "STATUS.json")
    assert status == {"exit_code": 0}


def test_additional_values_and_logs_come_on_request(flags, tmp_path, monkeypatch):
    """Without their flags, the log has no norm of parameters and no zero gradients, and neither
    TensorBoard nor progress.txt is written.
    """
    boards = {}

    class Board:
        def __init__(self, folder, purge_step):
            self.values = boards[folder] = {}

        def add_text(self, *words):
            pass

        def add_scalar(self, name, value, step):
            self.values[name, step] = value

        def close(self):
            pass

    library = SimpleNamespace(SummaryWriter=Board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)
    monkeypatch.setattr(launch_checks, "is_installed", lambda module: True)
    seen = []
    train(flags, seen.append)
    progress = tmp_path / "run" / "progress.txt"
    assert boards == {} and not progress.exists()
    assert not any("params_norm" in record or "num_zeros" in record for record in seen)
    more = ["--log-params-norm", "--log-num-zeros-in-grad", "--log-progress"]
    more += ["--tensorboard-dir", str(tmp_path / "board"), "--train-iters", "4"]
    train([*flags, *more], seen.append)
    *_, last = seen
    model = TrainedModel.load(tmp_path / "run", device="cpu").model
    norm = torch.stack([weight.norm() for weight in model.parameters()]).norm().item()
    assert last["params_norm"] == pytest.approx(norm)
    # The 40 documents have few of the words, so most rows of the embedding have no gradient.
    assert 0 < last["num_zeros"] < sum(weight.numel() for weight in model.parameters())
    assert boards[str(tmp_path / "board")]["train/grad_norm", 4] == last["grad_norm"]
    assert "Saved checkpoint\tIteration: 4" in progress.read_text()


def test_validations_call_the_callback_too(flags, tmp_path):
    """A validation is a record with valid_loss."""
    seen = []
    more = ["--valid-data-path", str(tmp_path / "valid.jsonl"), "--eval-interval", "2"]
    (tmp_path / "valid.jsonl").write_text('{"text": "99 hello"}\n')
    train([*flags, *more], seen.append)
    assert [record["iteration"] for record in seen if "valid_loss" in record] == [2, 3]


def test_an_error_ends_the_run_and_reaches_the_caller(flags, tmp_path, capsys):
    """The error itself is raised, STATUS.json names it, and the folder can be used again."""

    def callback(record):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(flags, callback)
    status = read_json(tmp_path / "run" / "STATUS.json")
    assert status["exit_code"] == 1 and "KeyError in step" in status["reason"]
    [usable] = capsys.readouterr().err.splitlines()  # no traceback
    assert usable.startswith("40 of 40 lines of ")
    assert train(flags) is ExitCode.DONE


def test_a_wrong_configuration_is_an_error_with_every_problem(flags):
    """from_args raises what the command line would report."""
    with pytest.raises(ConfigError, match=r"--lr -1") as caught:
        RunConfig.from_args([*flags, "--lr", "-1", "--seq-length", "1"])
    assert len(caught.value.problems) == 2


def test_a_trained_model_is_loaded_from_its_folder_alone(flags, tmp_path):
    """The checkpoint describes the model and the tokenizer, so the training data may be deleted."""
    train([*flags, "--save-interval", "2"])
    (tmp_path / "documents.jsonl").unlink()
    trained = TrainedModel.load(tmp_path / "run", device="cpu")
    assert not trained.model.training and trained.config.checkpoint.load == str(tmp_path / "run")
    assert isinstance(trained.generate("07 he", 4), str)
    earlier = TrainedModel.load(tmp_path / "run", step=2, device="cpu")
    assert not earlier.model.embedding.weight.equal(trained.model.embedding.weight)
    with pytest.raises(ValueError, match="the prompt is empty"):
        trained.generate("")
    with pytest.raises(NoCheckpointError, match="there is no checkpoint"):
        TrainedModel.load(tmp_path / "elsewhere")
    with pytest.raises(NoCheckpointError, match="there is no checkpoint of step 7"):
        TrainedModel.load(tmp_path / "run", step=7)


def test_a_conversation_model_answers_and_stops_at_the_end_of_the_turn(flags, tmp_path):
    """A model learns four answers by heart: it prints each one exactly and stops after it.

    The checkpoint stores the chat format, so the prompt is a user's message.
    """
    colours = {"sky": "blue", "grass": "green", "coal": "black", "snow": "white"}
    lines = [conversation(f"{thing}?", f"It is {it}.") for thing, it in colours.items()]
    data = tmp_path / "documents.jsonl"
    data.write_text("\n".join(lines))
    learn = "--lr 2e-2 --train-iters 60 --seq-length 256 --hidden-size 32"
    train([*flags, "--sft", *learn.split()])
    trained = TrainedModel.load(tmp_path / "run")
    for thing, it in colours.items():
        [prompt], ends = encode_prompts(trained.config, trained.tokenizer, texts([f"{thing}?"]))
        shown = trained.tokenizer.decode(prompt)
        assert shown == f"<|im_start|>user\n{thing}?<|im_end|>\n<|im_start|>assistant\n"
        [answer] = generate(trained.model, [prompt], 32, ends=ends)
        assert trained.tokenizer.decode(answer) == f"It is {it}.<|im_end|>"
        assert trained.generate(f"{thing}?", 32) == f"It is {it}."
    assert ends == {
        trained.tokenizer.special_tokens[end] for end in ("<|im_end|>", END_OF_DOCUMENT)
    }


def test_converted_weights_need_the_path_of_their_tokenizer(tmp_path):
    """Weights of Hugging Face name no tokenizer, so the caller gives one."""
    write_model(tmp_path / "llama", "llama", vocab_size=400)
    from_huggingface(tmp_path / "llama", tmp_path / "run")
    save_tokenizer(tmp_path / "tokenizer", byte_level(), eos_token="</s>")
    with pytest.raises(ValueError, match=r"run holds converted weights.*give tokenizer="):
        TrainedModel.load(tmp_path / "run")
    trained = TrainedModel.load(tmp_path / "run", tokenizer=tmp_path / "tokenizer")
    assert isinstance(trained.generate("Hello there", 4), str)
    trained.tokenizer.close()


def test_other_ranks_do_not_call_the_callback(flags):
    """Rank 0 writes the metrics, so it alone calls the callback."""
    at = flags.index("--log-jsonl")
    config = RunConfig.from_args(flags[:at] + flags[at + 2 :])
    state, console = SimpleNamespace(progress=RunProgress(), run_id="", config={}), None
    of_ranks = [
        writers_of(config, SimpleNamespace(rank=rank), state, {}, console, print)
        for rank in range(2)
    ]
    assert [[type(writer) for writer in writers] for writers in of_ranks] == [[CallbackWriter], []]


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuBLAS cannot change its workspace later")
def test_deterministic_runs_need_their_environment_before_torch(flags, monkeypatch):
    """Deterministic mode needs its environment variables before torch is imported."""
    for name, value in DETERMINISTIC.items():
        monkeypatch.setenv(name, value)
    config = RunConfig.from_args([*flags, "--deterministic-mode"])
    monkeypatch.delenv("MAMBA_DETERMINISTIC")
    with pytest.raises(RuntimeError, match=r"apply_environment\(\) before importing torch"):
        train(config)
    for name, value in environment(config.training).items():
        monkeypatch.setenv(name, value)
    # Without this patch, torch's deterministic settings would stay in this process.
    monkeypatch.setattr(pretrain, "configure_determinism", lambda: None)
    assert train(config) is ExitCode.DONE


def keywords(flags):
    """Return the options of words as keywords."""
    assert flags[::2] == [word for word in flags if word.startswith("--")]
    return {name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2])}


def test_keywords_are_the_flags_of_a_run(flags, tmp_path):
    """Values are texts, numbers, booleans, lists, paths and None; a keyword overrides words."""
    words = [word for word in flags if word != "--no-isolation-self-test"]
    options = {
        **keywords(words),
        "isolation_self_test": False,
        "lr": 1e-2,
        "hidden_size": np.int64(16),
        "data_path": [tmp_path / "documents.jsonl"],
        "save": tmp_path / "run",
        "train_samples": None,
        "data_fields": {"text": "text"},
    }
    config = RunConfig.from_args(**options)
    assert config == RunConfig.from_args([*flags, "--data-fields", "text=text"])
    assert config.is_given("optim.lr") and not config.is_given("training.train_samples")
    over = RunConfig.from_args([*flags, "--sft"], lr=2e-2, no_sft=True, exit_interval=2)
    assert (over.optim.lr, over.data.sft, over.training.exit_interval) == (2e-2, False, 2)
    assert train(flags, train_iters=1, no_load_optim=True) is ExitCode.DONE
    assert train(**{**options, "train_iters": 2}) is ExitCode.DONE
    seen = []
    assert train(flags, seen.append, lr=5e-3, min_lr=5e-3) is ExitCode.DONE
    assert [(one["iteration"], one["learning_rate"]) for one in seen] == [(3, 5e-3)]


def test_variables_of_a_template_are_a_dict(flags):
    variables = {"enable_thinking": False}
    config = RunConfig.from_args(flags, sft=True, chat_template_kwargs=variables)
    assert json.loads(config.data.chat_template_kwargs) == variables


def test_flags_of_megatron_are_keywords_too(flags):
    assert RunConfig.from_args(flags, override_opt_param_scheduler=True) is not None
    assert RunConfig.from_args(flags, override_opt_param_scheduler=False) is not None
    with pytest.raises(ConfigError, match=r"^--fp16: "):
        RunConfig.from_args(flags, fp16=True)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"trian_iters": 3}, r"^trian_iters=: is not an option; did you mean train_iters\?\.$"),
        (
            {"zzzzzzzzzz": None},
            "^zzzzzzzzzz=: is not an option; remove it; each flag of --help-all",
        ),
        ({"lr": "fast"}, "^lr= 'fast': must be a number"),
        ({"train_iters": 2.5}, r"--train-iters 2\.5: must be a whole number"),
        ({"train_iters": True}, "--train-iters True: must be a whole number"),
        ({"sft": 1}, "^sft= 1: must be true or false; write true or false"),
        ({"tokenizer_model": 3}, "^tokenizer_model= 3: must be text, but is read as int"),
        (
            {"chat_template_kwargs": {"a": {1}}},
            "^chat_template_kwargs= .*: must be text, but is read as dict",
        ),
        ({"num_train_epochs": 3}, "^num_train_epochs= 3: .*give --train-epochs 3"),
        (
            {"lr": 1e-3, "lr_decay_style": "fast"},
            "--lr-decay-style 'fast': must be one of constant",
        ),
    ],
)
def test_wrong_keywords_are_refused_with_a_cure(flags, option, said):
    with pytest.raises(ConfigError, match=said):
        train(flags, **option)


def test_no_option_has_the_name_of_an_argument():
    names = {name for name in inspect.signature(train).parameters if name != "options"}
    assert not names & set(_keywords())


def test_a_quiet_run_prints_nothing_and_logs_the_same(flags, tmp_path, capfd):
    """Progress, warnings and lines of a run are left out, also those of a resumed one."""
    more = {"tokenizer_type": "TrainedBPETokenizer", "tokenizer_vocab_size": 300}
    more |= {"valid_data_path": tmp_path / "valid.jsonl", "eval_interval": 2, "async_save": True}
    (tmp_path / "valid.jsonl").write_text('{"text": "99 hello"}\n')
    seen = []
    assert train(flags, seen.append, quiet=True, **more) is ExitCode.DONE
    assert train(flags, seen.append, quiet=True, **more, train_iters=5) is ExitCode.DONE
    assert capfd.readouterr() == ("", "")
    steps = [one["iteration"] for one in seen if "lm_loss" in one]
    assert steps == [1, 2, 3, 4, 5]
    logged = read_lines(tmp_path / "log.jsonl")
    assert [one["iteration"] for one in logged if "lm_loss" in one] == steps
    # A damaged checkpoint is skipped without a word, and a callback may print.
    newest = tmp_path / "run" / "step_00000005"
    next(newest.glob("*.safetensors")).write_bytes(b"")
    more["callback"] = lambda record: print("mine")
    assert train(flags, quiet=True, **more, train_iters=4) is ExitCode.DONE
    assert capfd.readouterr() == ("mine\n" * 2, "")
    (tmp_path / "documents.jsonl").write_text("{}\n" * 40)
    with pytest.raises(DataError):
        train(flags, quiet=True, train_iters=6)
    assert capfd.readouterr() == ("", "")


def test_arguments_of_another_type_are_refused(flags):
    """Arguments of a wrong type raise an error before the run starts."""
    with pytest.raises(TypeError, match=r"config is of type str; pass a RunConfig, or a list of"):
        train(" ".join(flags))
    with pytest.raises(TypeError, match="config is of type dict; pass a RunConfig"):
        train({"lr": 1})
    with pytest.raises(TypeError, match="lr= cannot change a RunConfig; pass the words"):
        train(RunConfig.from_args(flags), lr=1e-3)
    with pytest.raises(TypeError, match="callback is 3; pass a function"):
        train(flags, 3)
    with pytest.raises(TypeError, match="argv is one text; pass a list of words"):
        RunConfig.from_args(" ".join(flags))
