"""Tests of `PackedDataset`: content of packs, distribution over ranks and workers, and resume."""

import json
import pickle
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_packed.data import packed_dataset
from megatron_packed.data.errors import DataError
from megatron_packed.data.index.indexed_writer import IndexedWriter
from megatron_packed.data.packed_dataset import PackedDataset
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.inputs.open_documents import open_documents
from megatron_packed.inputs.plan_packs import plan_training
from support.data_helpers import byte_level, conversation, save_tokenizer
from support.json_lines import write_texts
from support.run_configs import run_config

T, DOCUMENTS = 96, 41
EOD = ByteTokenizer.eod_id


@pytest.fixture
def lines(tmp_path):
    """Write a file of documents that all differ; the longest two are longer than a pack."""
    random = np.random.default_rng(3)
    lengths = [*random.integers(3, 60, DOCUMENTS - 2), 150, 230]
    texts = [f"{number:03d}{'x' * length}" for number, length in enumerate(lengths)]
    path = tmp_path / "documents.jsonl"
    write_texts(path, texts)
    return path, texts


def dataset_of(path, **options):
    options = {"tokens_per_pack": T, "overlong_policy": "truncate", **options}
    return PackedDataset(path, ByteTokenizer(), show_progress=False, **options)


def documents_of(pack):
    """Return the tokens of each real document of a pack."""
    ends = pack.packed.cu_seqlens[: pack.packed.num_seqs + 1].tolist()
    return [tuple(pack.tokens[a:b].tolist()) for a, b in pairwise(ends)]


def contents(packs):
    return [pack.tokens.tolist() for pack in packs]


def expected_documents(texts):
    return Counter((*text.encode(), EOD)[:T] for text in texts)


@pytest.mark.parametrize("world_size, num_workers", [(1, 0), (1, 2), (2, 2), (3, 0), (3, 1)])
def test_every_document_is_in_exactly_one_pack_of_all_ranks(world_size, num_workers, lines):
    """No document is missing or repeated, for any number of ranks and workers."""
    found, counts = Counter(), set()
    for rank in range(world_size):
        dataset = dataset_of(lines[0], rank=rank, world_size=world_size)
        loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
        packs = list(loader)
        assert contents(packs) == contents(dataset), "workers change the order of the packs"
        counts.add(len(packs))
        assert len(packs) == len(loader)
        found.update(document for pack in packs for document in documents_of(pack))
    assert found == expected_documents(lines[1])
    assert len(counts) == 1, "ranks run different numbers of packs"


def test_ranks_without_a_pack_get_one_without_documents(lines):
    """In the last round, ranks without a pack get a pack without documents.

    A round gives one pack to each rank. With drop_last, an incomplete last round is dropped.
    """
    whole = len(dataset_of(lines[0]))
    world_size = next(size for size in range(2, whole) if whole % size)
    filled = [dataset_of(lines[0], rank=rank, world_size=world_size) for rank in range(world_size)]
    packs = [pack for dataset in filled for pack in dataset]
    empty = [pack for pack in packs if pack.packed.num_seqs == 0]
    assert len(packs) == len(empty) + whole and len(empty) == world_size - whole % world_size
    assert all(pack.num_target_tokens == 0 for pack in empty)
    assert {pack.packed.cu_seqlens.numel() for pack in packs} == {filled[0].max_documents + 2}
    dropped = dataset_of(lines[0], rank=0, world_size=world_size, drop_last=True)
    assert len(list(dropped)) == len(dropped) == whole // world_size


def test_a_pack_holds_whole_documents_and_no_target_crosses_one(lines):
    """Offsets, positions, labels and mask agree with the documents of each pack."""
    dataset = dataset_of(lines[0])
    assert dataset.max_documents == max(pack.packed.num_seqs for pack in dataset)
    for pack in dataset:
        packed, documents = pack.packed, documents_of(pack)
        assert packed.cu_seqlens.dtype == torch.int32 and pack.tokens.shape == (T,)
        assert packed.cu_seqlens.numel() == dataset.max_documents + 2
        assert packed.cu_seqlens[0] == 0 and (packed.cu_seqlens[packed.num_seqs + 1 :] == T).all()
        labels, mask = torch.zeros(T, dtype=torch.int32), torch.zeros(T)
        start = 0
        for document in documents:
            end = start + len(document)
            assert packed.position_ids[start:end].tolist() == list(range(len(document)))
            labels[start : end - 1] = torch.tensor(document[1:])
            mask[start : end - 1] = 1
            start = end
        assert torch.equal(pack.labels, labels) and torch.equal(pack.loss_mask, mask)
        rows = packed.cu_seqlens.diff()
        assert packed.max_seqlen == rows.max()


def test_capacity_and_longest_row_can_be_constant(lines):
    """A given max_documents and fixed_max_seqlen are the same in every pack."""
    dataset = dataset_of(lines[0], max_documents=2, fixed_max_seqlen=True)
    shapes = {(pack.packed.cu_seqlens.numel(), pack.packed.max_seqlen) for pack in dataset}
    assert shapes == {(4, T)} and dataset.max_documents == 2
    assert max(pack.packed.num_seqs for pack in dataset) == 2


def test_packs_are_those_of_a_training_run(lines):
    """The dataset makes the packs that a run with the same options trains on, in their order."""
    config = run_config(
        {"cuda_graph_impl": "none"},
        {"data_path": (str(lines[0]),), "valid_data_path": ("other.jsonl",)},
        seq_length=T,
        global_batch_size=1,
        packing_window=4096,
    )
    documents = open_documents(config.data, ByteTokenizer(), validates=False, show=False).train
    plan, _, _ = plan_training(config, documents)
    dataset = dataset_of(lines[0], seed=config.training.seed)
    for step, pack in enumerate(dataset):
        [[numbers]] = plan.step(step).packs
        expected = [
            tuple(documents.document(int(n), 0, int(plan.pieces.length[n]))[0]) for n in numbers
        ]
        assert documents_of(pack) == expected


@pytest.mark.parametrize(
    ("answer_end", "end"), [("turn", "<|im_end|>"), ("document", "<|im_end|><|endoftext|>")]
)
def test_only_answers_are_targets_of_conversations(answer_end, end, tmp_path):
    """With sft the targets are the assistant's answers, including the ends of its turns."""
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(conversation(f"ask {n}", f"answer {n}") for n in range(9)))
    tokenizer, text = ByteTokenizer(), ""
    options = {"tokens_per_pack": 256, "sft": True, "show_progress": False}
    for pack in PackedDataset(path, tokenizer, answer_end=answer_end, **options):
        text += tokenizer.decode(pack.labels[pack.loss_mask > 0].tolist())
    for number in range(9):
        assert text.count(f"answer {number}{end}") == 1
    assert text.count("<|") == 9 * end.count("<|")
    assert "ask" not in text and "user" not in text


def test_epochs_hold_the_same_documents_in_other_packs(lines):
    """Another epoch or another seed packs the same documents in another order."""
    dataset = dataset_of(lines[0])
    first = contents(dataset)
    assert contents(dataset) == first == contents(dataset_of(lines[0]))
    dataset.set_epoch(1)
    second = list(dataset)
    assert contents(second) != first != contents(dataset_of(lines[0], seed=5))
    found = Counter(document for pack in second for document in documents_of(pack))
    assert found == expected_documents(lines[1])
    assert max(pack.packed.num_seqs for pack in second) <= dataset.max_documents
    with pytest.raises(ValueError, match="epoch is -1"):
        dataset.set_epoch(-1)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_run_that_resumes_sees_the_rest_of_its_epoch(taken, lines):
    """A loaded state yields exactly the remaining packs, also on another number of ranks. The next
    epoch is unchanged."""
    dataset = dataset_of(lines[0])
    dataset.set_epoch(2)
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state == dataset.state_dict(taken)
    rest = contents(iterator)
    resumed = dataset_of(lines[0])
    resumed.load_state_dict(state)
    assert resumed.epoch == 2 and len(resumed) == len(rest)
    resumed.set_epoch(2)
    assert contents(resumed) == rest
    assert contents(DataLoader(resumed, batch_size=None, num_workers=2)) == rest
    of_ranks = []
    for rank in range(2):
        one = dataset_of(lines[0], rank=rank, world_size=2)
        one.load_state_dict(state)
        of_ranks.append(contents(one))
    dealt = [pack for both in zip(*of_ranks) for pack in both]
    assert dealt[: len(rest)] == rest and not np.any(dealt[len(rest) :])
    resumed.set_epoch(3)
    dataset.set_epoch(3)
    assert contents(resumed) == contents(dataset)


def test_every_worker_resumes_from_a_state_of_its_own(lines, monkeypatch):
    """Each worker that loads its own state continues at its own position."""
    workers, taken = 3, [2, 2, 1]  # packs per worker after the loader has yielded five packs
    states, rests = [], []
    for number in range(workers):
        info = SimpleNamespace(id=number, num_workers=workers)
        monkeypatch.setattr(packed_dataset, "get_worker_info", lambda info=info: info)
        dataset = dataset_of(lines[0])
        iterator = iter(dataset)
        for _ in range(taken[number]):
            next(iterator)
        states.append(dataset.state_dict())
        rests.append(contents(iterator))
        resumed = dataset_of(lines[0])
        resumed.load_state_dict(states[-1])
        assert contents(resumed) == rests[-1]
    assert states[0] == states[1] != states[2]


def test_a_state_is_refused_where_it_would_be_wrong(lines):
    """A state of other packs is refused. A process that has yielded no pack must be given
    packs_taken."""
    dataset = dataset_of(lines[0])
    with pytest.raises(ValueError, match=r"has not iterated.*packs_taken"):
        dataset.state_dict()
    state = dataset.state_dict(1)
    for options in ({"seed": 8}, {"max_documents": 1}, {"tokens_per_pack": 2 * T}):
        with pytest.raises(ValueError, match="the state belongs to other packs"):
            dataset_of(lines[0], **options).load_state_dict(state)


def test_a_pickle_opens_the_files_again(lines):
    """A spawned worker gets a small pickle, and yields the same packs."""
    dataset = dataset_of(lines[0])
    dataset.set_epoch(1)
    assert contents(pickle.loads(pickle.dumps(dataset))) == contents(dataset)


def test_indexed_data_sets_and_text_are_packed_together(lines, tmp_path):
    """Text files and the prefix of one of Megatron's indexed data sets can be given together."""
    with IndexedWriter(tmp_path / "indexed", np.int32) as writer:
        for number in range(5):
            writer.add_document(np.array([7, 8, 9, number, EOD]))
    dataset = dataset_of([lines[0], tmp_path / "indexed"])
    found = Counter(document for pack in dataset for document in documents_of(pack))
    assert found == expected_documents(lines[1]) + Counter((7, 8, 9, n, EOD) for n in range(5))
    assert len(dataset.sentences()) >= 3
    with pytest.raises(DataError, match=r"indexed is an indexed data set.*leave sft out"):
        dataset_of(tmp_path / "indexed", sft=True, overlong_policy=None)


def test_a_tokenizer_may_be_a_path(lines, tmp_path):
    """The tokenizer can be given as the path of a tokenizer.json or of its directory."""
    expected = save_tokenizer(tmp_path / "tokenizer", byte_level(), eos_token="</s>")
    dataset = PackedDataset(
        lines[0], tmp_path / "tokenizer", tokens_per_pack=256, show_progress=False
    )
    assert dataset.sentences()
    text = "".join(expected.decode(pack.tokens.tolist(), skip_special=True) for pack in dataset)
    assert all(text[:-1].count(line[:3]) >= 1 for line in lines[1])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 2, "world_size": 2}, r"rank \(2\) is not one of world_size \(2\) ranks"),
        ({"max_document_length": 200}, r"max_document_length \(200\) must be .* at most .* \(96\)"),
        ({"overlong_policy": "truncate_prompt"}, "add sft=True"),
        ({"chat_template": "chatml"}, "add sft=True"),
        ({"answer_end": "text"}, "answer_end is 'text'; give turn or document"),
        ({"overlong_policy": "error"}, "2 documents are longer than 96 tokens"),
        ({"packing_method": "best"}, "unknown packing method"),
        ({"max_documents": 0}, "max_documents is 0"),
        ({"max_documents": T + 1}, r"max_documents \(97\) is more than tokens_per_pack \(96\)"),
        ({"tokens_per_pack": 96.0}, "tokens_per_pack is 96.0; give an integer"),
        ({"tokens_per_pack": None}, "tokens_per_pack is None; give an integer"),
        ({"tokens_per_pack": 1}, "tokens_per_pack is 1; it must be at least 2"),
        ({"seed": 1.5}, "seed is 1.5; give an integer"),
        ({"world_size": "2"}, "world_size is '2'; give an integer"),
    ],
)
def test_wrong_options_are_refused(options, message, lines):
    """A wrong option raises an error with the option, its value and the cure."""
    with pytest.raises(ValueError, match=message):
        dataset_of(lines[0], **options)


@pytest.mark.parametrize("paths", [None, [], 5, [5], ""])
def test_values_that_are_no_paths_are_refused(paths):
    """Missing or empty paths and other types raise an error with the value."""
    with pytest.raises(ValueError, match="give a path or a list of at least one path"):
        dataset_of(paths)


@pytest.mark.parametrize("tokenizer", [None, 3, ByteTokenizer])
def test_values_that_are_no_tokenizers_are_refused(tokenizer, lines):
    """A class, or an object of another library, raises an error that names the accepted values."""
    with pytest.raises(DataError, match=r"pass a Tokenizer of this package.*save_pretrained"):
        PackedDataset(lines[0], tokenizer, tokens_per_pack=T)


def test_the_allowed_share_of_bad_lines_can_be_raised(lines):
    """One bad line of a few ends the construction, unless max_bad_fraction allows it."""
    with lines[0].open("a") as file:
        file.write('{"body": 1}\n')
    with pytest.raises(DataError, match="1 of 42 lines are unusable"):
        dataset_of(lines[0])
    dataset = dataset_of(lines[0], max_bad_fraction=0.1)
    found = Counter(document for pack in dataset for document in documents_of(pack))
    assert found == expected_documents(lines[1])


def test_fields_with_other_names(tmp_path):
    """A mapping names the fields of the lines; a wrong mapping is a ValueError before any work."""
    line = json.dumps({"q": "why", "a": ["so", "it is"]}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 3)
    fields = {"prompt": "q", "completion": "a"}
    dataset = dataset_of(tmp_path / "a.jsonl", sft=True, data_fields=fields)
    [pack] = dataset
    assert bytes(pack.tokens.tolist()[: len("whyso\nit is")]) == b"whyso\nit is"
    with pytest.raises(ValueError, match=r"data_fields .*prompt needs completion"):
        dataset_of(tmp_path / "a.jsonl", sft=True, data_fields={"prompt": "q"})


def test_an_iteration_continues_with_its_own_epoch(lines):
    """A call of set_epoch during an iteration changes neither its packs nor the next position."""
    dataset = dataset_of(lines[0])
    expected = contents(dataset)
    iterator = iter(dataset)
    first = next(iterator).tokens.tolist()
    dataset.set_epoch(1)
    assert [first, *contents(iterator)] == expected
    with pytest.raises(ValueError, match="has no position to save"):
        dataset.state_dict()


@pytest.mark.parametrize("taken", [-1, 1.5, 10_000])
def test_impossible_positions_are_refused(taken, lines):
    """Positions outside of the iteration raise an error instead of a wrong state."""
    dataset = dataset_of(lines[0])
    with pytest.raises(ValueError, match=f"packs_taken is {taken}"):
        dataset.state_dict(taken)
    with pytest.raises(ValueError, match=r"epoch is 1\.5; give an integer"):
        dataset.set_epoch(1.5)
    for state in ({}, None):
        with pytest.raises(ValueError, match="is not a state_dict"):
            dataset.load_state_dict(state)


def test_hugging_face_models_compute_documents_one_by_one(lines):
    """A Hugging Face model computes the same logits and loss for packed documents as for each
    document by itself."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    pack = next(pack for pack in dataset_of(lines[0]) if pack.packed.num_seqs > 2)
    inputs = pack.to_huggingface()
    with torch.no_grad():
        output = model(**inputs, use_cache=False)
        loss_sum, at = 0.0, 0
        for document in documents_of(pack):
            tokens = torch.tensor(document)[None]
            alone = model(tokens, labels=tokens, use_cache=False)
            found = output.logits[:, at : at + len(document)]
            assert torch.allclose(found, alone.logits, atol=1e-5)
            loss_sum += alone.loss.item() * (len(document) - 1)
            at += len(document)
    assert output.loss.item() == pytest.approx(loss_sum / pack.num_target_tokens, rel=1e-5)
