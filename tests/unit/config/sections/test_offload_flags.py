"""Flags of offload: Megatron's spellings and their effect on a layer."""

from megatron_packed.config.parser.parse import parse
from megatron_packed.config.sections.memory import INSIDE, OFFLOADED_IN, MemoryConfig
from support.command_lines import argv_of

OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
WHOLE = "--offload-layer-inputs --recompute-granularity full --recompute-num-layers"


def memory(right, text: str) -> MemoryConfig:
    return parse(argv_of(right, text)).memory


def test_inputs_of_layers_and_of_groups(right) -> None:
    assert not memory(right, "").offloads
    for text, offloaded in (
        ("1 --recompute-method uniform", [True, True, True]),
        ("2 --recompute-method uniform", [True, False, True]),
        ("2 --recompute-method block", [True, True, False]),
    ):
        found = memory(right, f"{WHOLE} {text}")
        assert found.offloads and found.offloaded_modules == ()
        assert [found.offloads_input(number) for number in range(3)] == offloaded


def test_parts_of_layers(right) -> None:
    found = memory(
        right,
        f"{OFFLOAD} mamba_scan mlp_norm mamba_scan --offload-buffers 4 --offload-headroom-mib 0",
    )
    assert found.offloads and found.offloaded_modules == ("mamba_scan", "mlp_norm")
    assert not any(found.offloads_input(number) for number in range(3))
    both = memory(right, f"{WHOLE} 1 --recompute-method block {OFFLOAD} core_attn mlp_act")
    assert [both.offloads_input(number) for number in range(3)] == [True, False, False]
    assert [both.offloads_module("core_attn", number) for number in range(3)] == [False, True, True]
    apart = memory(
        right,
        f"{OFFLOAD} attn_proj mamba_norm --recompute-activations --recompute-modules core_attn mamba",
    )
    assert apart.offloaded_modules == ("attn_proj", "mamba_norm")


def test_every_part_that_recomputation_holds_is_a_part(right) -> None:
    assert set().union(*INSIDE.values()) <= set(OFFLOADED_IN)
    assert (
        MemoryConfig().offload_buffers == 2
        and MemoryConfig().min_offloaded_tensor_size == 1024 * 1024
    )
