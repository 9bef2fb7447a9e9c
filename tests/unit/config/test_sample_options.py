"""A new option needs edits of few files: three sample options, and the files of each.

The tests of the options are in ``changed/sample_options.py``; they run with a package that has all
three.
"""

from __future__ import annotations

from pathlib import Path

from support.changed_package import Edit, changed_package, run_tests

MOST_FILES = 4
OF_PACKS = (
    Edit(
        "config/sections/packing.py",
        "    pad_packed_seq_alignment: int | None = option(",
        """    tail_slots: int = option(
        0,
        "Number of slots that stay empty at the end of each pack.",
        unit="slots",
        minimum=0,
        resume="packs",
    )
    pad_packed_seq_alignment: int | None = option(""",
    ),
    Edit(
        "data/packing/packer.py",
        "slots=config.tokens_per_pack,",
        "slots=config.tokens_per_pack - config.tail_slots,",
    ),
)
"""Option on which packs depend, so that a resumed run must keep it."""
OF_A_KIND = (
    Edit(
        "config/kinds/mamba.py",
        "    mamba_chunk_size: int = option(",
        """    mamba_heads_without_skip: int = option(
        0,
        "Number of Mamba heads that begin without the skip connection D.",
        unit="heads",
        multiple_of="mamba_num_groups",
        training_only=True,
    )
    mamba_chunk_size: int = option(""",
    ),
    Edit(
        "layers/kinds/mamba.py",
        '"mixer.D": ones,',
        '"mixer.D": lambda D_N, _, config: D_N.fill_(1.0)[: config.mamba_heads_without_skip].zero_(),',
    ),
)
"""Option of a kind of layer: a multiple of another option."""
WITH_STATE = (
    Edit(
        "config/sections/model.py",
        "    make_vocab_size_divisible_by: int = option(",
        """    count_packs: bool = option(
        False, "Count the packs of the training in the checkpoint.", training_only=True
    )
    make_vocab_size_divisible_by: int = option(""",
    ),
    Edit(
        "models/hybrid_model.py",
        "        self._join_experts(groups, device)",
        """        self._join_experts(groups, device)
        if config.count_packs:
            self.register_buffer("packs", torch.zeros((), device=device))""",
    ),
    Edit(
        "models/hybrid_model.py",
        "        packed = self.prepare(micro_batch.packed)\n        whole",
        """        packed = self.prepare(micro_batch.packed)
        if self.config.count_packs and self.training:
            self.packs += 1
        whole""",
    ),
)
"""Option with state in the checkpoint."""


def test_sample_options_need_edits_of_few_files(tmp_path: Path) -> None:
    for edits in (OF_PACKS, OF_A_KIND, WITH_STATE):
        assert len({edit.file for edit in edits}) <= MOST_FILES
    folder = changed_package(tmp_path, edits=(*OF_PACKS, *OF_A_KIND, *WITH_STATE))
    run_tests(folder, Path(__file__).parents[2] / "changed" / "sample_options.py")
