"""Record of a kind of layer, and the table of all kinds.

Modules that kinds import, for example ``conditions``, read `KINDS` only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType, new_class
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from megatron_packed.config.errors import Problems
    from megatron_packed.config.run import RunConfig
    from megatron_packed.config.section import Section, Sound
    from megatron_packed.config.sections.parallel import ParallelConfig

Exchanged = Literal["heads", "states", "keys and values", ""]
"""Tensors that context-parallel ranks send to each other for a layer; empty for none."""
OptionsOfKind = Any
"""Options of a model, for a function of one kind: the class of the kind's own options."""
INPUT, ACTIVATION, EVERYTHING = "input", "activation", "everything"
LAYER_NORM = "layernorm"
"""Name in ``--recompute-modules`` of the norms of all layers."""
RESERVED = ("|", "/", "D", "+")
"""Symbols that have another meaning in the pattern, here or in Megatron."""


def heads_or_states(option: str, value: str) -> Callable[[ParallelConfig], Exchanged]:
    """Return ``exchanges`` of a recurrent kind, whose ranks pass states if ``option`` is ``value``."""

    def exchanged(parallel: ParallelConfig) -> Exchanged:
        passes = parallel.context_parallel_size > 1 and getattr(parallel, option) == value
        return "states" if passes else "heads"

    return exchanged


@dataclass(frozen=True)
class Shared:
    """Option with a number of items, such as heads, that tensor-parallel ranks share.

    Args:
        option: option of the model.
        may_be_fewer: several ranks may hold copies of one item.
        exchanged: context-parallel ranks that exchange heads share the items, too.
        of_experts: ranks of ``--expert-tensor-parallel-size`` share the items if they are fewer.
    """

    option: str
    may_be_fewer: bool = False
    exchanged: bool = True
    of_experts: bool = False


@dataclass(frozen=True)
class LayerPart:
    """Module of a layer whose saved tensors can be offloaded.

    Args:
        name: name in ``--offload-modules``.
        path: path of the module in the layer.
        saves: tensors that are offloaded: the `INPUT` of a norm or projection, that of an
            `ACTIVATION` function, or `EVERYTHING` that is saved between two projections.
    Raises:
        ValueError: the path is outside of norm and mixer, or ``saves`` is none of the three.
    """

    name: str
    path: str
    saves: str = INPUT

    def __post_init__(self) -> None:
        if self.path != "norm" and not self.path.startswith("mixer."):
            raise ValueError(
                f"the part {self.name!r} has the path {self.path!r}; write 'norm', or 'mixer.' and "
                "the name of a module in the mixer"
            )
        if self.saves not in (INPUT, ACTIVATION, EVERYTHING):
            raise ValueError(
                f"the part {self.name!r} has saves {self.saves!r}; choose {INPUT!r}, {ACTIVATION!r} or {EVERYTHING!r}"
            )


@dataclass(frozen=True)
class Projection:
    """Weight of a mixer that may have an adapter (``--lora-rank``).

    Args:
        path: path of the module in the mixer, or of a parameter with the weights of all experts.
        part: part of the model in ``--lora-target-modules``.
        matrices: usual Hugging Face names of the matrices that its rows are, in order. If the rows
            are one matrix, that has the last name. The module's name when empty.
        canonical: names of these matrices in Megatron-Bridge, if it has other names than Megatron.
    """

    path: str
    part: str
    matrices: tuple[str, ...] = ()
    canonical: tuple[str, ...] = ()


def gated_mlp(path: str, part: str) -> tuple[Projection, ...]:
    """Return the two projections of an MLP, whose first may have a gate."""
    return (
        Projection(
            f"{path}fc1", part, ("gate_proj", "up_proj"), ("linear_fc1_gate", "linear_fc1_up")
        ),
        Projection(f"{path}fc2", part, ("down_proj",)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerKind:
    """Kind of layer: one symbol of the hybrid layer pattern.

    Args:
        symbol: symbol in the pattern.
        name: name in help and messages, and heading of its options of the model.
        place: place among the kinds, in ascending order; symbols decide between equal places.
        noun: word before "layer" in messages; the name when empty.
        options: title of a section -> class with the options that the kind adds to it.
        rules: function of further problems between its options of the model. It is called if the
            pattern has such a layer, or is wrong and an option of the kind is given.
        left_out: function of options of a model whose values mean the same as leaving them out;
            it returns the values that they then have.
        cross_rules: function of problems with other sections, for a pattern with such a layer.
        required: options that a pattern with such a layer needs.
        refused_elsewhere: options that a pattern without such a layer excludes.
        backends: op -> option that chooses its backend.
        mixes_tokens: a token's output depends on other tokens, so the layer needs boundaries.
        attends: the layer is attention.
        carries_order: the output depends on the order of tokens, without a position embedding.
        may_have_bias: linear layers have a bias unless ``--disable-bias-linear`` is given.
        has_mlp: the mixer is an MLP of width ``--ffn-hidden-size``.
        has_experts: the mixer is a mixture of experts.
        shared: numbers that tensor-parallel ranks share.
        exchanges: function of what context-parallel ranks exchange in a layout.
        heads: options with the numbers of exchanged heads, and of groups that heads share.
        without_heads: option of the parallel layout and its value with which ranks exchange no heads.
        graph_modules: names in ``--cuda-graph-modules``, first that of the whole layer.
        mixer_module: name of the mixer in ``--recompute-modules``.
        recomputed: other names in ``--recompute-modules``, each of a part -> parts that then save
            other tensors or none: the part itself, and for an activation the part that reads it.
        inside_norm: parts that save other tensors if the output of the norm is recomputed.
        parts: parts for ``--offload-modules``.
        projections: weights that may have adapters, with their names in ``--lora-target-modules``.
        example: flags of a small layer with heads and states as wide as those of large models.
    """

    symbol: str
    name: str
    place: int = 100
    noun: str = ""
    options: Mapping[str, type[Section]] = field(default_factory=dict)
    rules: Callable[[OptionsOfKind, Sound], Problems] | None = None
    left_out: Callable[[OptionsOfKind], dict[str, Any]] = lambda model: {}
    cross_rules: Callable[[RunConfig, Sound], Problems] | None = None
    required: tuple[str, ...] = ()
    refused_elsewhere: tuple[str, ...] = ()
    backends: Mapping[str, str] = field(default_factory=dict)
    mixes_tokens: bool = True
    attends: bool = False
    carries_order: bool = False
    may_have_bias: bool = False
    has_mlp: bool = False
    has_experts: bool = False
    shared: tuple[Shared, ...] = ()
    exchanges: Callable[[ParallelConfig], Exchanged] = lambda parallel: ""
    heads: tuple[str, ...] = ()
    without_heads: tuple[str, str] | None = None
    graph_modules: tuple[str, ...] = ()
    mixer_module: str = ""
    recomputed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    inside_norm: tuple[str, ...] = ()
    parts: tuple[LayerPart, ...] = ()
    projections: tuple[Projection, ...] = ()
    example: str = ""

    def __post_init__(self) -> None:
        symbol, named = self.symbol, {part.name: part for part in self.parts}
        if len(symbol) != 1 or symbol in RESERVED or symbol != symbol.upper() or symbol.isspace():
            raise ValueError(
                f"the kind {self.name} has the symbol {symbol!r}; choose one character that is no "
                f"lower-case letter, no blank and none of {' '.join(RESERVED)}"
            )
        if len(named) < len(self.parts):
            raise ValueError(
                f"the kind {self.name} has parts {[part.name for part in self.parts]}; give each part another name"
            )
        if unknown := [name for name in self.inside_norm if name not in named]:
            raise ValueError(
                f"the kind {self.name} has no part {unknown}, which `inside_norm` names"
            )
        for name, inside in self.recomputed.items():
            wanted = 2 if name in named and named[name].saves == ACTIVATION else 1
            if not {name, *inside} <= named.keys() or len(inside) != wanted or inside[0] != name:
                raise ValueError(
                    f"the kind {self.name} has recomputed[{name!r}] = {inside}; name a part of "
                    "`parts`, then itself, and for an activation the part that reads it"
                )

    @property
    def layer(self) -> str:
        """Words for a layer of this kind, for example ``expert layer``."""
        return f"{self.noun or self.name} layer"

    @property
    def state_option(self) -> tuple[str, str] | None:
        """Option of the parallel layout and its value with which ranks pass states; None if no value
        of an option does that.
        """
        return None if self.attends else self.without_heads

    @property
    def recompute_modules(self) -> dict[str, tuple[str, ...]]:
        """Names in ``--recompute-modules``, each with the parts inside."""
        mixer = tuple(part.name for part in self.parts if part.path != "norm")
        return {**({self.mixer_module: mixer} if self.mixer_module else {}), **self.recomputed}

    @property
    def has_activation(self) -> bool:
        """Return whether the mixer has an activation function, in one MLP or in experts."""
        return self.has_mlp or self.has_experts


class Kinds(Mapping[str, LayerKind]):
    """All kinds by symbol, in order of their place. The first use imports their modules."""

    def __getitem__(self, symbol: str) -> LayerKind:
        return self._records[symbol]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def in_words(self) -> str:
        """Return the symbols with their names as one text: recurrences, attention, others."""
        kinds = sorted(self.values(), key=lambda kind: (not kind.mixes_tokens, kind.attends))
        return ", ".join(f"{kind.symbol} {kind.name}" for kind in kinds)

    @cached_property
    def backends(self) -> dict[str, str]:
        """Option of the backend of each op of all kinds: op -> name."""
        return {op: name for kind in self.values() for op, name in kind.backends.items()}

    def options_of(self, section: str) -> type:
        """Return a class with the options that all kinds add to a section, in order of the kinds."""
        added = [kind.options[section] for kind in self.values() if section in kind.options]
        # Kinds may share a class, and a class may be a base of another one.
        bases = dict.fromkeys(
            kind_class
            for kind_class in added
            if sum(issubclass(other, kind_class) for other in {*added}) == 1
        )
        owners: dict[str, type] = {}
        for kind_class in added:
            for name in vars(kind_class).get("__annotations__", {}):
                if owners.setdefault(name, kind_class) is not kind_class:
                    raise ValueError(
                        f"{kind_class.__name__} and {owners[name].__name__} both have {name}"
                    )
        # Dataclass fields follow the bases from right to left.
        return new_class(section, tuple(reversed(bases)))

    @cached_property
    def _records(self) -> dict[str, LayerKind]:
        package = __name__.rpartition(".")[0]
        files = sorted(Path(__file__).parent.glob("[!_]*.py"))
        records: dict[str, LayerKind] = {}
        for file in files:
            module = import_module(f"{package}.{file.stem}")
            kind = record_of(module, "KIND", LayerKind)
            if kind is None:
                continue
            if kind.symbol in records:
                raise ValueError(
                    f"two kinds have the symbol {kind.symbol!r}; see {module.__file__}"
                )
            records[kind.symbol] = kind
        in_order = sorted(records.values(), key=lambda kind: (kind.place, kind.symbol))
        check_names(in_order)
        return {kind.symbol: kind for kind in in_order}


_Record = TypeVar("_Record")


def record_of(module: ModuleType, name: str, record: type[_Record]) -> _Record | None:
    """Return the record ``name`` of a module in a folder of kinds; None for a module of helpers.

    Raises:
        ImportError: the module has a record with another name, or another value with this name.
    """
    value = vars(module).get(name)
    if isinstance(value, record):
        return value
    other_names = [key for key, each in vars(module).items() if isinstance(each, record)]
    if value is not None or other_names:
        raise ImportError(
            f"{module.__name__} has no {record.__name__} with the name {name}, but "
            f"{' and '.join(other_names) or type(value).__name__}; call the record {name}"
        )
    return None


def check_names(kinds: Iterable[LayerKind]) -> None:
    """Check that options can tell the modules of all kinds apart; kinds may share an equal part.

    Raises:
        ValueError: two kinds have the same name for different modules.
    """
    owners: dict[tuple[str, str], tuple[LayerKind, object]] = {}
    for kind in kinds:
        for option, modules in (
            ("--cuda-graph-modules", dict.fromkeys(kind.graph_modules, kind)),
            ("--recompute-modules", dict.fromkeys(kind.recompute_modules, kind)),
            ("--offload-modules", {part.name: part for part in kind.parts}),
        ):
            for name, module in modules.items():
                owner, other = owners.setdefault((option, name), (kind, module))
                if other != module:
                    raise ValueError(
                        f"the kinds {owner.name} and {kind.name} both have {name!r} for {option}; choose another name"
                    )


KINDS = Kinds()
