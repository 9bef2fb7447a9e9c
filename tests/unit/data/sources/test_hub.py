"""Tests of hf:// paths with a stand-in for huggingface_hub: commits, downloads and refusals."""

import json
import sys
from fnmatch import fnmatch
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from megatron_packed.config.hub_paths import HubPath, is_hub_name, parse_hub_path
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.data.errors import DataError, NotTokenizedError
from megatron_packed.data.known_files import first_lines_refusal
from megatron_packed.data.packed_dataset import PackedDataset
from megatron_packed.data.sources import hub
from megatron_packed.data.sources.source_files import expand_paths
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.inputs.hub_commits import agree_on_commits
from megatron_packed.inputs.open_documents import build_tokenizer, open_documents
from support.data_helpers import byte_level, save_tokenizer

OLD, NEW = "a" * 40, "b" * 40


class GatedRepoError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


class ConnectError(Exception):
    pass


class Hub:
    """Stand-in for huggingface_hub with a data set ``org/set`` and a model ``org/model``."""

    def __init__(self, root):
        self.root = root
        self.is_online = True
        self.calls = []
        self.head = OLD
        self.files = {
            ("dataset", "org/set"): {
                "README.md": "",
                "dataset_infos.json": '{"default": {}}',
                "data/train.json": json.dumps([{"text": "a"}, {"text": "b"}], indent=1),
                "data/more/x.jsonl": '{"text": "c"}\n',
            },
            ("model", "org/model"): {"tokenizer.json": "{}", "model.safetensors": "weights"},
        }

    def repo_info(self, name, *, repo_type, revision, timeout):
        assert timeout <= 60
        self.calls.append(("info", name, revision))
        if not self.is_online:
            raise ConnectError("Name or service not known\nsecond line")
        if name == "org/gated":
            raise GatedRepoError("403")
        if (repo_type, name) not in self.files:
            raise RepositoryNotFoundError("404")
        return SimpleNamespace(sha={None: self.head, "main": self.head, "v1": OLD}[revision])

    def snapshot_download(
        self,
        name,
        *,
        repo_type,
        revision,
        allow_patterns=None,
        etag_timeout=10,
        local_files_only=False,
    ):
        self.calls.append(("download", name, revision))
        folder = self.root / f"{repo_type}s--{name.replace('/', '--')}" / "snapshots"
        if local_files_only or not self.is_online:
            found = sorted(folder.glob("*" if revision is None else revision))
            if not found:
                raise ConnectError("no network")
            return str(found[-1])
        for path, text in self.files[repo_type, name].items():
            if any(fnmatch(path, pattern) for pattern in allow_patterns):
                file = folder / revision / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        (folder / revision).mkdir(parents=True, exist_ok=True)
        return str(folder / revision)


@pytest.fixture
def online(tmp_path, monkeypatch):
    fake = Hub(tmp_path / "hub")
    module = ModuleType("huggingface_hub")
    module.__spec__ = ModuleSpec("huggingface_hub", None, origin="here")
    module.HfApi = lambda: fake
    module.snapshot_download = fake.snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    monkeypatch.setattr(hub, "_commits", {})
    monkeypatch.setattr(hub, "_local", {})
    monkeypatch.chdir(tmp_path)
    return fake


def test_paths_of_the_hub():
    for path, expected in {
        "hf://datasets/o/n": ("dataset", "o/n", None, ""),
        "hf://datasets/o/n@v1/a/b.jsonl": ("dataset", "o/n", "v1", "a/b.jsonl"),
        "hf://datasets/o/n@refs/convert/parquet/x/": (
            "dataset",
            "o/n",
            "refs/convert/parquet",
            "x",
        ),
        "hf://Qwen/Qwen3-0.6B/tokenizer.json": ("model", "Qwen/Qwen3-0.6B", None, "tokenizer.json"),
    }.items():
        assert parse_hub_path(path) == HubPath(*expected)
    for path in ("hf://", "hf://datasets/o", "hf://o", "hf://o/n/../../x", "hf://spaces/o/n"):
        assert parse_hub_path(path) is None, path


def test_names_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert is_hub_name("tatsu-lab/alpaca") and is_hub_name("Qwen/Qwen3-0.6B")
    for path in ("data/alpaca", "alpaca", "org/a.jsonl", "org/a.json.zst", "/org/a", "org/a/b"):
        assert not is_hub_name(path), path


def test_names_in_python_are_answered_with_their_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"or hf://datasets/org/set for a data set of the Hugging"):
        PackedDataset("org/set", ByteTokenizer(), tokens_per_pack=64)
    with pytest.raises(DataError, match=r"or hf://org/model for a model of the Hugging Face Hub"):
        PackedDataset("a.jsonl", "org/model", tokens_per_pack=64)


def test_files_directories_and_patterns_are_downloaded(online):
    said = []
    whole = expand_paths(["hf://datasets/org/set"], said.append)
    assert [file.name for file in whole] == ["x.jsonl", "train.json"]
    assert said[0].startswith(f"hf://datasets/org/set: commit {OLD}, in ")
    assert "1 file (dataset_infos.json) not read" in said[1]
    for inside, names in {
        "data/train.json": ["train.json"],
        "data": ["x.jsonl", "train.json"],
        "data/more/*.jsonl": ["x.jsonl"],
    }.items():
        found = expand_paths([f"hf://datasets/org/set/{inside}"])
        assert [file.name for file in found] == names
    assert [call for call in online.calls if call[0] == "info"] == [("info", "org/set", None)]
    assert not list(online.root.rglob("README.md"))


def test_one_commit_for_a_process_and_the_latest_copy_without_a_network(online, monkeypatch):
    path = "hf://datasets/org/set/data"
    assert OLD in str(expand_paths([path])[0])
    online.head = NEW
    assert OLD in str(expand_paths([f"{path}/train.json"])[0])
    assert NEW in str(expand_paths(["hf://datasets/org/set@main/data"])[0])
    online.is_online = False
    monkeypatch.setattr(hub, "_commits", {})
    monkeypatch.setattr(hub, "_local", {})
    assert NEW in str(expand_paths([path])[0])
    online.calls.clear()
    assert OLD in str(expand_paths([f"hf://datasets/org/set@{OLD}/data"])[0])
    assert online.calls == [("download", "org/set", OLD)]  # a commit needs no request


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("hf://datasets/org/none", "has no such dataset, or it is private; correct the name"),
        (
            "hf://datasets/org/gated",
            "accept the conditions at https://huggingface.co/datasets/org/",
        ),
        ("hf://datasets/org/set/none.jsonl", f"does not exist at commit {OLD}; check the names"),
        (
            "hf://datasets/org",
            "is no path of a dataset on the Hugging Face Hub; write hf://datasets",
        ),
        ("hf://org/model", "is no path of a dataset on the Hugging Face Hub"),
    ],
)
def test_refusals_are_one_sentence(online, path, part):
    with pytest.raises(DataError, match=part) as caught:
        expand_paths([path])
    assert "\n" not in str(caught.value)


def test_without_network_or_package(online, monkeypatch):
    online.is_online = False
    sentence = r"ConnectError: Name or service not known\); run `hf download org/set --repo-type "
    with pytest.raises(DataError, match=sentence) as caught:
        expand_paths(["hf://datasets/org/set"])
    assert "\n" not in str(caught.value)
    module = "megatron_packed.config.hub_paths.is_installed"
    monkeypatch.setattr(module, lambda name: False)
    with pytest.raises(DataError, match=r"not installed; pip install huggingface_hub\.$"):
        expand_paths(["hf://datasets/org/set"])


def test_data_and_tokenizer_of_a_run(online, tmp_path):
    """A run opens data and tokenizer of the Hub, and stores tokens in the current directory."""
    save_tokenizer(tmp_path, byte_level())
    for file in tmp_path.glob("tokenizer*"):
        online.files["model", "org/model"][file.name] = file.read_text()
    config = DataConfig(
        data_path=("1", "hf://datasets/org/set/data", "1", "hf://datasets/org/set/data/more"),
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model="hf://org/model",
    )
    agree_on_commits(config.hub_paths, SimpleNamespace(rank=0, world_size=1))
    assert hub.known_commits() == {
        "dataset org/set@": (OLD, False),
        "model org/model@": (OLD, False),
    }
    tokenizer = build_tokenizer(config, None)
    documents = open_documents(config, tokenizer, validates=False, show=False)
    tokenizer.close()
    assert len(documents.train) == 4
    assert {path.name for path in tmp_path.iterdir()} >= {".megatron_packed_cache", "hub"}
    assert not list(online.root.rglob("*.safetensors")) + list(online.root.rglob(".mega*"))
    packs = PackedDataset("hf://datasets/org/set", ByteTokenizer(), tokens_per_pack=64)
    assert len(packs) == 1


def test_all_ranks_raise_the_error_of_rank_0(online, monkeypatch):
    config = DataConfig(data_path=("hf://datasets/org/none",))
    sent = []
    monkeypatch.setattr(
        "megatron_packed.inputs.hub_commits.all_gather_json",
        lambda value, groups: sent.append(value) or [sent[0]],
    )
    for rank in range(2):
        with pytest.raises(DataError, match="has no such dataset"):
            agree_on_commits(config.hub_paths, SimpleNamespace(rank=rank, world_size=2))
    assert len(online.calls) == 1  # only rank 0 sends a request
    # A run agrees only on paths of the Hub.
    assert not DataConfig(data_path=("a.jsonl",)).hub_paths


def test_explain_sends_no_request(online):
    """Commands that only describe a run use earlier downloads, or report that there are none."""
    path = "hf://datasets/org/set/data"
    for read in (
        lambda: expand_paths([path], download=False),
        lambda: build_tokenizer(
            DataConfig(
                data_path=(path,),
                tokenizer_type="HuggingFaceTokenizer",
                tokenizer_model="hf://org/model",
            ),
            None,
            build_missing=False,
        ),
    ):
        with pytest.raises(NotTokenizedError, match=r"^hf://\S+ is not downloaded yet; run `hf "):
            read()
    assert first_lines_refusal(DataConfig(data_path=(path,))) == ""
    assert ("info", "org/set", None) not in online.calls
    found = expand_paths([path])
    for memory in (hub._commits, hub._local):
        memory.clear()
    online.calls.clear()
    assert expand_paths([path], download=False) == found
    assert {kind for kind, *_ in online.calls} == {"download"}


@pytest.mark.parametrize("sha", ["../../../../../escaped", "/tmp/escaped", "", None, "\x1b[31m"])
def test_a_commit_that_is_a_path_is_refused_before_a_download(online, sha):
    """The commit of the Hub's answer names a folder of the cache."""
    online.head = sha
    with pytest.raises(DataError, match="not with 40 hexadecimal digits") as error:
        hub.local_path("hf://datasets/org/set")
    assert str(error.value).isprintable()
    assert [call[0] for call in online.calls] == ["info"] and not online.root.exists()
