"""The packages that this one can use, and the strangers that are taken for them; the standard
library alone.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package by its name on an index."""

    name: str
    module: str
    """What is imported to see whether it works."""
    use: str
    install: str = ""
    """The command; ``pip install NAME`` when empty."""
    required: bool = False
    kernels: tuple[str, ...] = ()
    """``op.backend`` of `ops.backend_dispatch` that need it."""

    @property
    def command(self) -> str:
        return self.install or f"pip install {self.name}"


_BUILD = "MAX_JOBS=8 pip install --no-build-isolation"
"""Without isolation they are built against the torch that is installed."""

PACKAGES = (
    Package(name="torch", module="torch", use="everything", required=True),
    Package(name="numpy", module="numpy", use="data and packing", required=True),
    Package(name="tokenizers", module="tokenizers", use="tokenizer.json", required=True),
    Package(name="jinja2", module="jinja2", use="chat templates", required=True),
    Package(name="pyyaml", module="yaml", use="--config", required=True),
    Package(name="google-crc32c", module="google_crc32c", use="checksums", required=True),
    Package(name="rich", module="rich", use="the console", required=True),
    Package(name="matplotlib", module="matplotlib", use="curves of reports", required=True),
    Package(
        name="triton",
        module="triton",
        use="kernels of our own",
        kernels=(
            "rope.triton",
            "rms_norm.triton",
            "gated_rms_norm.triton",
            "activation.triton",
            "cross_entropy.triton",
            "permute.triton",
        ),
    ),
    Package(
        name="transformer-engine",
        module="transformer_engine.pytorch",
        use="layers, attention, context parallelism",
        install=f"{_BUILD} 'transformer-engine[pytorch]'",
        kernels=(
            "varlen_attention.transformer_engine",
            "context_parallel_attention.transformer_engine",
            "layers.transformer_engine",
            "adamw.transformer_engine",
        ),
    ),
    Package(
        name="flash-attn-4",
        module="flash_attn.cute",
        use="attention, the fastest on Hopper and Blackwell",
        install="pip install --pre flash-attn-4",
        kernels=("varlen_attention.flash_attn_4",),
    ),
    Package(
        name="flash-attn",
        module="flash_attn.flash_attn_interface",
        use="attention",
        install=f"{_BUILD} flash-attn",
        kernels=("varlen_attention.flash_attn_2",),
    ),
    Package(
        name="mamba-ssm",
        module="mamba_ssm",
        use="the scan of Mamba layers",
        install=f"{_BUILD} mamba-ssm",
        kernels=("ssd.mamba_ssm",),
    ),
    Package(
        name="causal-conv1d",
        module="causal_conv1d",
        use="the convolution of Mamba layers",
        install=f"{_BUILD} 'causal-conv1d>=1.6'",
        kernels=("causal_conv1d.causal_conv1d",),
    ),
    Package(name="einops", module="einops", use="imported by mamba-ssm and flash-attn"),
    Package(
        name="apex",
        module="apex",
        use="AdamW, where it is asked for",
        kernels=("adamw.apex",),
        install="APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex",
    ),
    Package(name="nvidia-ml-py", module="pynvml", use="driver, clocks and temperature"),
    Package(name="pyarrow", module="pyarrow", use="Parquet, Hugging Face data sets on disk"),
    Package(
        name="tiktoken",
        module="tiktoken",
        use="--tokenizer-type TikTokenizer",
        install="pip install 'tiktoken>=0.9'",
    ),
    Package(
        name="sentencepiece",
        module="sentencepiece",
        use="--tokenizer-type SentencePieceTokenizer",
        install="pip install 'sentencepiece>=0.2.3'",
    ),
    Package(name="tensorboard", module="tensorboard", use="--tensorboard-dir"),
    Package(name="wandb", module="wandb", use="--wandb-project"),
    Package(name="mlflow-skinny", module="mlflow", use="--mlflow-experiment"),
)


def package_of_kernel(op: str, backend: str) -> Package | None:
    """Return the package that a backend of an op needs; None if it needs no optional one."""
    return next((package for package in PACKAGES if f"{op}.{backend}" in package.kernels), None)


def is_installed(module: str) -> bool:
    """Return whether a module could be imported, without importing it or the packages that it lies
    in.

    A directory without code, such as the one in which W&B keeps its files, is no package.
    """
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    for name in rest:
        if spec is None:
            return False
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None and spec.origin is not None


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """A package that people install by mistake."""

    name: str
    what: str
    meant: str
    """The package that was wanted, by its name in `PACKAGES`; empty for this one."""
    versions: str = ""
    """Only versions that match this pattern are the stranger's."""
    in_the_way: bool = False
    """Whether it takes the module name of what was meant: then both cannot be there."""

    @property
    def fix(self) -> str:
        """Removes it, and installs what was meant unless that has no wheel and is rarely needed."""
        away = f"pip uninstall -y {self.name}"
        package = next(
            (one for one in PACKAGES if one.name == self.meant and not self.in_the_way), None
        )
        return away if package is None else f"{away} && {package.command}"


STRANGERS = (
    Stranger(
        name="apex",
        versions=r"0\.9",
        meant="apex",
        in_the_way=True,
        what="a toolkit for the web framework Pyramid, of 2013; NVIDIA's apex is on no package index",
    ),
    Stranger(
        name="apex-personal",
        meant="apex",
        in_the_way=True,
        what="somebody's copy of NVIDIA's apex, of 2023",
    ),
    Stranger(
        name="mamba", meant="mamba-ssm", what="a test runner; the model's kernels are mamba-ssm"
    ),
    Stranger(name="megatron", meant="", what="a library of 2019 for features in NumPy"),
    Stranger(
        name="flash-attention",
        meant="flash-attn",
        what="a port to Huawei's Ascend; the one for CUDA is flash-attn",
    ),
)


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is absent or unrecorded."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def strangers() -> list[tuple[Stranger, str]]:
    """Those that are installed, with their versions."""
    found = [(stranger, version_of(stranger.name)) for stranger in STRANGERS]
    return [
        (one, version)
        for one, version in found
        if version is not None and re.match(one.versions, version)
    ]
