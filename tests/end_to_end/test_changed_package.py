"""Files that a new kind of layer needs, and edits that a new option needs, in a copy of the package.

The tests of the changes are in ``tests/changed``; they run with the package that has all of them.
"""

from __future__ import annotations

from pathlib import Path

from support.changed_package import (
    NEW_KIND,
    TESTS,
    Edit,
    changed_package,
    new_files,
    run_tests,
)

MOST_NEW_FILES = 3
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
        "        packed = self.prepare(micro_batch.packed)\n",
        """        packed = self.prepare(micro_batch.packed)
        if self.config.count_packs and self.training:
            self.packs += 1
""",
    ),
)
"""Option with state in the checkpoint."""


def test_a_kind_needs_new_files_and_an_option_edits_of_few_files(tmp_path: Path) -> None:
    new = new_files(NEW_KIND)
    assert 2 <= len(new) <= MOST_NEW_FILES
    for edits in (OF_PACKS, OF_A_KIND, WITH_STATE):
        assert len({edit.file for edit in edits}) <= MOST_FILES
    folder = changed_package(tmp_path, new_files=new, edits=(*OF_PACKS, *OF_A_KIND, *WITH_STATE))
    run_tests(folder, TESTS / "changed" / "new_kind.py", TESTS / "changed" / "sample_options.py")
