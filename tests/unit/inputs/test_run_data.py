"""Data of a run with CUDA graphs: capacities, limited packs, and numbers of eager packs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.data.errors import DataError
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs import run_data as run_data
from megatron_packed.inputs.plan_packs import plan_evaluation, plan_training
from megatron_packed.inputs.run_data import build_data, check_alike
from megatron_packed.packed.capture_sizes import choose_capacities
from megatron_packed.resume.compared_runs import Resumed
from support.json_lines import write_texts
from support.run_configs import SEED, SLOTS, run_config


def documents(count: int, seed: int) -> SimpleNamespace:
    """Return documents: half below 200 tokens, a tenth longer than a pack; all but the first
    token are targets.
    """
    lengths = np.exp(np.random.default_rng(seed).normal(5.3, 1.7, count)).astype(int) + 30
    return of_lengths(lengths)


def of_lengths(lengths: np.ndarray) -> SimpleNamespace:
    """Return text documents of these lengths; every token but a document's first is a target."""
    count_targets = lambda document, start, length: np.asarray(length) - 1  # noqa: E731
    return SimpleNamespace(
        lengths=lengths,
        source_lengths=lengths,
        source_targets=lengths - 1,
        count_targets=count_targets,
    )


def packs_of(plan, epochs: int = 3) -> list[list[list[int]]]:
    epochs_of_packs = [plan.epoch(epoch) for epoch in range(epochs)]
    return [[packs[number].tolist() for number in range(len(packs))] for packs in epochs_of_packs]


TRAIN, VALID = documents(600, seed=2), documents(120, seed=9)
NO_GRAPHS = {"cuda_graph_impl": "none"}
PLAIN, _, _ = plan_training(run_config(NO_GRAPHS), TRAIN)
COUNTS = [int(PLAIN.epoch(epoch).documents_per_pack.max()) for epoch in range(3)]


def test_the_data_of_this_file_would_overflow_later() -> None:
    """Without a limit, later epochs have fuller packs; otherwise the tests below could not fail."""
    assert max(COUNTS[1:]) > COUNTS[0]


@pytest.mark.parametrize("validated", [False, True])
def test_auto_covers_three_epochs_and_validation(validated: bool) -> None:
    config = run_config()
    evaluation = plan_evaluation(config, VALID)
    plan, capture_sizes, report = plan_training(config, TRAIN, evaluations=[evaluation] * validated)
    first = PLAIN.epoch(0).documents_per_pack
    counts = np.concatenate([first, evaluation.documents_per_pack]) if validated else first
    assert capture_sizes.capacities == choose_capacities(counts) == report.graph_capacities
    assert {capture_size.max_seqlen for capture_size in capture_sizes.sizes} == {SLOTS}
    for epoch in range(3):
        assert plan.epoch(epoch).documents_per_pack.max() <= capture_sizes.largest
    if validated:
        assert evaluation.documents_per_pack.max() <= capture_sizes.largest
    ours, plain = packs_of(plan), packs_of(PLAIN)
    assert ours[0] == plain[0]  # the limit is chosen so that epoch 0 does not change
    assert [ours[epoch] == plain[epoch] for epoch in (1, 2)] == [
        count <= COUNTS[0] for count in COUNTS[1:]
    ]
    assert plan.hash != PLAIN.hash  # another order of the data
    assert report.packs_beyond == 0
    assert report.sentences()[-1].endswith(f"{capture_sizes.largest} covers every pack.")


def test_the_plan_is_a_function_of_training_data_and_options_alone() -> None:
    config = run_config()
    alone, _, _ = plan_training(config, TRAIN)
    crowded = documents(400, seed=1)
    crowded.lengths = np.full(400, 20)  # a validation pack has 102 documents
    evaluation = plan_evaluation(config, crowded, dp_size=4)
    plan, capture_sizes, _ = plan_training(config, TRAIN, dp_size=4, evaluations=[evaluation])
    assert capture_sizes.largest >= 100
    assert plan.hash == alone.hash
    assert packs_of(plan) == packs_of(alone)


@pytest.mark.parametrize("capacities", [(5,), (3, 5), (64,)])
def test_the_balanced_packer_keeps_to_given_capacities(capacities: tuple[int, ...]) -> None:
    config = run_config({"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": capacities})
    evaluation = plan_evaluation(config, VALID)
    plan, capture_sizes, _ = plan_training(config, TRAIN, evaluations=[evaluation])
    assert capture_sizes.capacities == capacities
    assert [plan.epoch(epoch).documents_per_pack.max() <= capacities[-1] for epoch in range(3)] == [
        True
    ] * 3
    assert evaluation.documents_per_pack.max() <= capacities[-1]
    if capacities[-1] >= max(COUNTS):  # capacities beyond all packs change no pack
        assert packs_of(plan) == packs_of(PLAIN)


@pytest.mark.parametrize(
    "capacities, held", [((1,), True), ((1, 3), True), ((64,), False), ((), False)]
)
def test_packs_that_capacities_keep_empty_are_spoken_of(
    capacities: tuple[int, ...], held: bool
) -> None:
    graphs = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": capacities}
    _, capture_sizes, report = plan_training(run_config(graphs), TRAIN)
    assert (
        any(
            f"hold at most {capture_sizes.largest} documents" in line for line in report.sentences()
        )
        == held
    )
    assert (report.fill < 0.9) == held


def test_long_documents_are_not_taken_for_held_packs() -> None:
    """The report does not blame the limit for empty slots if no two documents fit into one pack."""
    long = documents(60, seed=3)
    long.lengths = np.full(60, SLOTS * 3 // 5)
    graphs = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": (1,)}
    _, _, report = plan_training(run_config(graphs), long)
    assert report.fill < 0.7 and not report.held_empty


def test_a_limit_within_the_capacities_leaves_the_plan_of_a_run_without_graphs() -> None:
    """A limit within the capacities gives the same plan with and without graphs."""
    without, _, _ = plan_training(run_config(NO_GRAPHS, max_documents_per_pack=5), TRAIN)
    graphs = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": (3, 5)}
    plan, _, _ = plan_training(run_config(graphs, max_documents_per_pack=5), TRAIN)
    assert plan.hash == without.hash


def metadata_of(plan: PackPlan) -> dict:
    """Return metadata of a checkpoint after eight packs of a plan."""
    return {
        "room": plan.room,
        "plan_hash": plan.hash,
        "progress": {"iteration": 2, "consumed_packs": 8},
        "config": {"packing": {"global_batch_size": plan.packs_per_step, "micro_batch_size": 1}},
    }


def resuming(
    graphs: dict,
    plan: PackPlan,
    epochs: float,
    train: SimpleNamespace = TRAIN,
    begins: bool = False,
    **packing,
):
    """Return the plan and capacities of a run that resumes in the middle of the first epoch.

    ``begins``: the run begins a phase.
    """
    config = run_config(graphs, **packing)
    steps = int(len(plan.epoch(0)) * epochs) // plan.packs_per_step
    config = replace(config, training=replace(config.training, train_iters=steps))
    checkpoint = Resumed(metadata_of(plan), "two" if begins else None)
    return plan_training(config, train, resumed=checkpoint)


@pytest.mark.parametrize(
    ("capacities", "batches"), [((), 1), ((3, max(COUNTS)), 1), ((64,), 1), ((), 2)]
)
def test_graphs_that_are_switched_on_change_no_pack(
    capacities: tuple[int, ...], batches: int
) -> None:
    """A run of three epochs resumes with graphs; a later epoch has the pack with most documents.

    After a change of the batch the hash of the plan names the new batch, and the packs stay.
    """
    graphs = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": capacities}
    size = batches * PLAIN.packs_per_step
    plan, capture_sizes, _ = resuming(graphs, PLAIN, 3, global_batch_size=size)
    assert (plan.hash == PLAIN.hash) == (batches == 1) and packs_of(plan) == packs_of(PLAIN)
    assert capture_sizes.largest >= max(COUNTS)
    assert capture_sizes.capacities == capacities or not capacities


def test_capacities_that_would_change_packs_are_refused_with_the_flag_that_keeps_them() -> None:
    graphs = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": (3, COUNTS[0])}
    sizes = f"3 {COUNTS[0]} {max(COUNTS)}"
    cure = f"give --cuda-graph-max-packed-seqs {sizes} .or auto. to resume with graphs: a resumed"
    with pytest.raises(CheckpointMismatchError, match=cure):
        resuming(graphs, PLAIN, 3)
    # A run that ends after one epoch has no later pack with more documents.
    plan, capture_sizes, _ = resuming(graphs, PLAIN, 1)
    assert plan.hash == PLAIN.hash and capture_sizes.largest == COUNTS[0]
    other = run_config(graphs, seq_length=SLOTS // 2)
    checkpoint = Resumed(metadata_of(PLAIN))
    # No error here: the load refuses this checkpoint later, because --seq-length has changed.
    plan_training(other, TRAIN, resumed=checkpoint)


@pytest.mark.parametrize(
    "graphs", [NO_GRAPHS, {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": (64,)}, None]
)
@pytest.mark.parametrize("before", [(), (5,), (8,)])
def test_graphs_that_are_switched_off_or_given_more_room_change_no_pack(
    before: tuple[int, ...], graphs
) -> None:
    then, _, _ = plan_training(
        run_config({"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": before}), TRAIN
    )
    plan, capture_sizes, _ = resuming(graphs, then, 3)
    assert plan.hash == then.hash and packs_of(plan) == packs_of(then)
    assert capture_sizes is None or capture_sizes.largest >= max(
        int(then.epoch(n).documents_per_pack.max()) for n in range(3)
    )


@pytest.mark.parametrize(("seed", "room"), [(1, 5), (2, None)], ids=["same data", "other data"])
def test_a_phase_keeps_the_limit_of_packs_that_it_continues(seed: int, room: int | None) -> None:
    """On other data, a phase without graphs packs by its own options."""
    graphs = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": (5,)}
    then, _, _ = plan_training(run_config(graphs), documents(99, seed=1))
    plan, _, _ = resuming(NO_GRAPHS, then, 3, documents(99, seed=seed), begins=True)
    assert plan.room == room and (plan.hash == then.hash) == (room is not None)


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"cuda_graph_impl": "none", "cuda_graph_max_packed_seqs": []}, None),
        ({"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": [9, 4]}, 9),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_max_packed_seqs": []}, "auto"),
    ],
)
def test_the_room_of_checkpoints_that_do_not_name_it(options: dict, room: int | str | None) -> None:
    packing = {"packing_method": "balanced", "global_batch_size": 8, "micro_batch_size": 2}
    metadata = {
        "config": {"cuda_graph": options, "packing": packing},
        "progress": {"iteration": 3},
        "plan_hash": "a",
    }
    assert Resumed(metadata).room == room
    assert Resumed(metadata).progress.consumed_packs == 12
    assert Resumed({**metadata, "room": 5}).room == 5
    packing["packing_method"] = "sequential"
    assert Resumed(metadata).room is None


def test_without_graphs_nothing_changes() -> None:
    plan, capture_sizes, report = plan_training(run_config(NO_GRAPHS), TRAIN)
    packer = Packer(slots=SLOTS, window=256)
    expected = [packer.pack(plan.pieces.length, SEED, epoch) for epoch in range(3)]
    assert packs_of(plan) == [
        [packs[number].tolist() for number in range(len(packs))] for packs in expected
    ]
    assert capture_sizes is None and not any("CUDA" in line for line in report.sentences())


@pytest.mark.parametrize("capacity", [64, 500])
def test_other_packers_are_left_alone_and_what_is_beyond_is_counted(capacity: int) -> None:
    crowded, packing = (
        documents(3000, seed=4),
        {"packing_method": "best_fit_decreasing", "packing_window": 4096},
    )
    graphs = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": (capacity,)}
    plan, _, report = plan_training(run_config(graphs, seq_length=8192, **packing), crowded)
    packs = Packer(slots=8192, method="best_fit_decreasing", window=4096).pack(
        plan.pieces.length, SEED
    )
    beyond = sum(packs[number].size > capacity for number in range(len(packs)))
    assert report.packs_beyond == beyond
    assert (beyond > 0) == (capacity == 64)
    if beyond:
        assert report.sentences()[-1] == (
            f"CUDA graphs: capacity 64 covers all but {beyond} of {len(packs)} packs, which run eagerly."
        )
    auto, capture_sizes, _ = plan_training(run_config(seq_length=8192, **packing), crowded)
    assert capture_sizes.largest == packs.documents_per_pack.max()
    assert len(capture_sizes.sizes) > 1
    assert auto.hash == plan.hash


# --------------------------------------------------------------------------------------------------------
# whole set-up


def build(folder, graphs: dict, method: str, packing: dict | None = None, **model):
    rng = np.random.default_rng(3)
    for name, count in (("train", 400), ("valid", 80)):
        texts = ["x" * int(n) for n in np.minimum(rng.geometric(0.08, count), 90)]
        write_texts(folder / f"{name}.jsonl", texts)
    paths = {
        "data_path": (str(folder / "train.jsonl"),),
        "valid_data_path": (str(folder / "valid.jsonl"),),
    }
    said: list[str] = []
    config = run_config(graphs, paths, seq_length=128, packing_method=method, **packing or {})
    config = replace(config, model=replace(config.model, **model))
    return build_data(config, ParallelGroups.single(), said.append), said


@pytest.mark.parametrize(("longest", "kept"), [(50, True), (20, False)])
def test_details_of_packs_are_said_if_a_token_is_lost(tmp_path, longest, kept) -> None:
    """A brief start leaves out the account of tokens only if every token is kept."""
    file = tmp_path / "train.jsonl"
    write_texts(file, ("x" * size for size in (40, 10, 5)))
    valid = tmp_path / "valid.jsonl"
    write_texts(valid, ["short"])
    paths = {"data_path": (str(file),), "valid_data_path": (str(valid),)}
    config = run_config(NO_GRAPHS, paths, seq_length=longest)
    said: list[str] = []
    details: list[str] = []
    build_data(config, ParallelGroups.single(), said.append, detail=details.append)
    assert any("Documents per pack" in line for line in (details if kept else said))
    assert not any("Documents per pack" in line for line in (said if kept else details))
    assert any("truncated" in line for line in said) == (not kept) and "truncated" not in details


def test_loaders_prepare_as_many_micro_batches_as_the_option_says(tmp_path) -> None:
    files = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    for file in files:
        write_texts(file, ["x" * 40])
    train, valid = (str(file) for file in files)
    paths = {"data_path": (train,), "valid_data_path": (valid,), "num_workers": 5}
    data = build_data(run_config(NO_GRAPHS, paths), ParallelGroups.single(), lambda text: None)
    assert [stream.loader._prefetch for stream in (data.train, data.valid)] == [5, 5]


def test_a_model_has_the_entries_that_it_was_given(tmp_path) -> None:
    tokenizer = build(tmp_path, NO_GRAPHS, "balanced")[0].tokenizer.vocab_size
    assert (
        build(tmp_path, NO_GRAPHS, "balanced", vocab_size=tokenizer + 40)[0].vocab_size
        == tokenizer + 40
    )
    with pytest.raises(DataError, match="is less than the 260 entries of the tokenizer"):
        build(tmp_path, NO_GRAPHS, "balanced", vocab_size=tokenizer - 1)


def micro_batches(data):
    """Yield micro-batches of the first training epoch and a validation, with their planned
    packs.
    """
    for stream, steps in (
        (data.train, len(data.train.plan.epoch(0)) // 4),
        (data.valid, len(data.valid.plan)),
    ):
        for step in range(steps):
            yield from zip(
                stream.loader.micro_batches(step), stream.plan.step(step).packs[0], strict=True
            )


def test_documents_lie_at_multiples_of_the_alignment(tmp_path) -> None:
    data, _ = build(tmp_path, NO_GRAPHS, "balanced", {"pad_packed_seq_alignment": 8})
    for batch, _ in micro_batches(data):
        assert not (batch.packed.document_lengths % 8).any()


@pytest.mark.parametrize("method", ["balanced", "best_fit_decreasing"])
def test_micro_batches_have_the_sizes_of_the_capture_sizes(tmp_path, method: str) -> None:
    data, said = build(
        tmp_path, {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": (8, 16)}, method
    )
    beyond = 0
    for batch, pack in micro_batches(data):
        capture_size = data.capture_sizes.smallest_for(pack.size, 128)
        beyond += capture_size is None
        size = (
            (pack.size, batch.packed.max_seqlen)
            if capture_size is None
            else (capture_size.capacity, 128)
        )
        assert (batch.packed.capacity, batch.packed.max_seqlen) == size
    assert (beyond > 0) == (method != "balanced")
    assert any(
        "packs of the validation data hold more than 16 documents" in line for line in said
    ) == (beyond > 0)
    data.close()


def test_automatic_capacities_leave_nothing_over(tmp_path) -> None:
    data, said = build(tmp_path, {"cuda_graph_impl": "local"}, "balanced")
    assert all(
        data.capture_sizes.smallest_for(pack.size, 128) is not None
        for _, pack in micro_batches(data)
    )
    assert any(
        line.startswith("CUDA graphs: capacit") and line.endswith("every pack.") for line in said
    )
    plain, _ = build(tmp_path, NO_GRAPHS, "balanced")
    assert plain.capture_sizes is None
    assert all(batch.packed.capacity == pack.size for batch, pack in micro_batches(plain))
    data.close()
    plain.close()


def test_ranks_that_read_other_data(monkeypatch) -> None:
    """Ranks with different data are refused, since each would expect other packs and targets."""

    def stream(plan: str, tokens: str) -> SimpleNamespace:
        return SimpleNamespace(
            plan=SimpleNamespace(hash=plan), dataset=SimpleNamespace(content_hash=tokens)
        )

    alike = {"training": ["p", "t"], "test": ["q", "u"]}
    others: list[dict] = []
    monkeypatch.setattr(run_data, "all_gather_json", lambda mine, groups: [mine, *others])
    mine = {"training": stream("p", "t"), "test": stream("q", "u")}
    for others[:] in ([], [alike, alike]):
        check_alike(mine, ParallelGroups.single())
    for others[:], sentence in (
        (
            [alike, {**alike, "training": ["p", "x"]}],
            "the training data of rank 2 differs from that of rank 0",
        ),
        ([{**alike, "test": ["x", "u"]}, alike], "the test data of rank 1 differs"),
        ([{"training": ["p", "t"]}], "the test data of rank 1 differs"),
        ([{**alike, "validation": ["v", "w"]}] * 2, "the validation data of rank 1, 2 differs"),
    ):
        with pytest.raises(DataError, match=sentence):
            check_alike(mine, ParallelGroups.single())


def test_ranks_compare_their_data_before_the_first_step(tmp_path, monkeypatch) -> None:
    """Ranks compare the plan and the tokens that the run will use."""
    asked: list[dict] = []

    def gathered(mine: dict, groups: ParallelGroups) -> list[dict]:
        asked.append(mine)
        return [mine, {name: ["another plan", tokens] for name, (_, tokens) in mine.items()}]

    monkeypatch.setattr(run_data, "all_gather_json", gathered)
    with pytest.raises(DataError, match="the training data of rank 1 differs from that of rank 0"):
        build(tmp_path, NO_GRAPHS, "balanced")
    monkeypatch.setattr(run_data, "all_gather_json", lambda mine, groups: [mine, mine])
    built, _ = build(tmp_path, NO_GRAPHS, "balanced")
    streams = {"training": built.train, "validation": built.valid}
    assert asked == [
        {name: [one.plan.hash, one.dataset.content_hash] for name, one in streams.items()}
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_loaders_know_whether_ranks_share_captured_collectives(overlap: bool, monkeypatch) -> None:
    """The loader gives all ranks the same capture size only if reductions are overlapped."""
    graphs = {"cuda_graph_impl": "full_iteration"}
    config = replace(run_config(graphs), parallel=ParallelConfig(overlap_grad_reduce=overlap))
    plan, capture_sizes, _ = plan_training(config, TRAIN)
    monkeypatch.setattr(run_data, "Loader", lambda *arguments, **options: options)
    loader = run_data._stream(config, ParallelGroups.single(), TRAIN, plan, capture_sizes).loader
    assert loader["same_on_all_ranks"] == overlap and loader["capture_sizes"] is capture_sizes


def test_another_padded_vocabulary_ends_the_run_before_the_data_is_read(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one two"}\n' * 20)
    config = run_config(NO_GRAPHS, seq_length=32)
    config = replace(config, data=replace(config.data, data_path=(str(tmp_path / "train.jsonl"),)))

    def vocabulary(config: RunConfig) -> int:
        return build_data(config, ParallelGroups.single(), lambda _: None).vocab_size

    def wanting(size: int, multiple: int = 128) -> RunConfig:
        model = replace(config.model, make_vocab_size_divisible_by=multiple)
        return replace(config, model=model, data=replace(config.data, padded_vocab_size=size))

    size = vocabulary(config)
    padded = config.model.padded_vocab_size(size)
    assert vocabulary(wanting(padded)) == size
    with pytest.raises(DataError) as caught:
        vocabulary(wanting(padded + 1))
    assert f"--padded-vocab-size {padded + 1} is not {padded}, to which {size} " in str(
        caught.value
    )
    assert f"give --make-vocab-size-divisible-by {padded + 1}, which" in str(caught.value)
    assert vocabulary(wanting(padded + 1, padded + 1)) == size
    with pytest.raises(DataError, match="give a tokenizer with fewer tokens"):
        vocabulary(wanting(size - 1))
