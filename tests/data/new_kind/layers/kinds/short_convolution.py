"""Gated short convolution on packed documents: ``out_proj(z * silu(conv1d(x)))``.

Letters: T tokens, B documents, C channels, I = C.
"""

from __future__ import annotations

from megatron_packed.config.kinds.short_convolution import KIND, ShortConvolutionOptions
from torch import Tensor, nn

from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers.build import Build
from megatron_packed.layers.hybrid_layer import ProjectedLayer
from megatron_packed.layers.kinds.mixer_kind import RECURRENT_STATE, IsolationCase, MixerKind
from megatron_packed.layers.recurrent_mixer import RECURRENT_FILLS, HeadInputs, RecurrentMixer
from megatron_packed.packed.params import PackedSeqParams


class Gate(nn.Module):
    """Gate in the place of a gated norm."""

    def forward(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        return z_TI * y_TI


class ShortConvolution(RecurrentMixer):
    """`RecurrentMixer` without a recurrence; the rows of ``in_proj.weight`` are ``[z | x]``."""

    def __init__(self, config: ShortConvolutionOptions, build: Build) -> None:
        x = SplitSegment(noun="channels of a short convolution", count=config.short_conv_channels)
        super().__init__(
            config.hidden_size,
            build,
            convolved=(x,),
            z=x,
            z_first=True,
            values_per_head=0,
            width=config.short_conv_width,
            bias=False,
            norm=Gate(),
        )

    def scan_heads(self, inputs: HeadInputs, packed: PackedSeqParams) -> Tensor:
        (y_TC1,), _, _ = inputs
        return y_TC1

    def final_states(self, inputs: HeadInputs, lengths: list[int]) -> Tensor:
        return inputs[0][0].new_empty(len(lengths), 0)

    def next_output(self, state_BN: Tensor, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        return inputs[0][0], state_BN


MIXER = MixerKind(
    kind=KIND,
    build=lambda config, build, place: ShortConvolution(config, build),
    layer=ProjectedLayer,
    state=RECURRENT_STATE,
    fills=RECURRENT_FILLS,
    isolation=IsolationCase(
        changes=lambda config, ranks: {"short_conv_channels": 16 * ranks.heads},
    ),
)
