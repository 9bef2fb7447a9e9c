"""Packages that this project can use, and unrelated packages with similar names; needs only the
standard library.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder


@dataclass(frozen=True, kw_only=True)
class Package:
    """Package that this project can use."""

    name: str
    module: str
    """Module that is imported to test the package."""
    use: str
    floor: str = ""
    """Oldest version that may be used, as in setup.cfg; empty if any version may be used."""
    install: str = ""
    """Install command; ``pip install`` with name and floor when empty."""
    required: bool = False
    kernels: tuple[str, ...] = ()
    """Backends that need the package, as ``op.backend`` of `ops.backend_dispatch`."""

    @property
    def command(self) -> str:
        wanted = f"'{self.name}>={self.floor}'" if self.floor else self.name
        return self.install or f"pip install {wanted}"

    def too_old(self) -> str:
        """Return a clause about an installed version below the floor; empty if there is none."""
        version = version_of(self.name)
        if not self.floor or version is None or _numbers(version) >= _numbers(self.floor):
            return ""
        return f"{self.name} {version}, which is older than {self.floor}"


_BUILD = "MAX_JOBS=8 pip install --no-build-isolation"
"""Command prefix that builds a package against the installed torch (no build isolation)."""

PACKAGES = (
    Package(name="torch", module="torch", use="everything", floor="2.11", required=True),
    # The oldest with wheels for Python 3.12.
    Package(name="numpy", module="numpy", use="data and packing", floor="1.26", required=True),
    # Older versions do not read the pairs of merges that tokenizer.json has since 0.20.
    Package(
        name="tokenizers",
        module="tokenizers",
        use="tokenizer.json",
        floor="0.20",
        required=True,
    ),
    # Templates leave the sandbox of older versions: CVE-2024-56326, CVE-2025-27516.
    Package(name="jinja2", module="jinja2", use="chat templates", floor="3.1.6", required=True),
    # The oldest with wheels for Python 3.12; 6.0 no longer builds.
    Package(name="pyyaml", module="yaml", use="--config", floor="6.0.1", required=True),
    # The oldest with compiled wheels for Python 3.12; without them, checksums are computed in Python.
    Package(
        name="google-crc32c",
        module="google_crc32c",
        use="checksums",
        floor="1.6",
        required=True,
    ),
    # The oldest with which the tests pass.
    Package(name="rich", module="rich", use="the console", floor="13.0", required=True),
    # The oldest that works with numpy 2.
    Package(
        name="matplotlib",
        module="matplotlib",
        use="curves of reports",
        floor="3.9",
        required=True,
    ),
    Package(
        name="triton",
        module="triton",
        use="Triton kernels of this package",
        kernels=(
            "rope.triton",
            "rms_norm.triton",
            "gated_rms_norm.triton",
            "gated_delta_rule.triton",
            "ssd.triton",
            "causal_conv1d.triton",
            "activation.triton",
            "cross_entropy.triton",
            "permute.triton",
            "router_logits.triton",
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
        use="attention, fastest on Hopper and Blackwell",
        install="pip install --pre flash-attn-4",
        kernels=("varlen_attention.flash_attn_4",),
    ),
    Package(
        name="quack-kernels",
        module="quack.gemm",
        use="products of experts, dense MLPs and last projections, fastest on Hopper",
        kernels=(
            "grouped_mlp.quack_joined",
            "grouped_mlp.quack",
            "dense_mlp.quack",
            "residual_projection.quack",
        ),
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
        use="the convolution of Mamba layers and gated delta nets",
        floor="1.6",
        install=f"{_BUILD} 'causal-conv1d>=1.6'",
        kernels=("causal_conv1d.causal_conv1d",),
    ),
    Package(
        name="fla-core",
        module="fla.ops.gated_delta_rule",
        use="gated delta nets with --gated-delta-rule-backend fla",
        kernels=("gated_delta_rule.fla",),
    ),
    Package(name="einops", module="einops", use="imports of mamba-ssm and flash-attn"),
    Package(
        name="apex",
        module="apex",
        use="AdamW with --optimizer-backend apex",
        kernels=("adamw.apex",),
        install="APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex",
    ),
    Package(name="nvidia-ml-py", module="pynvml", use="driver, clocks and temperature"),
    # A file runs code in older versions: CVE-2023-47248.
    Package(
        name="pyarrow",
        module="pyarrow",
        use="Parquet, Hugging Face data sets on disk, zstd",
        floor="14.0.1",
    ),
    Package(name="huggingface_hub", module="huggingface_hub", use="hf:// paths"),
    Package(
        name="tiktoken",
        module="tiktoken",
        use="--tokenizer-type TikTokenizer",
        floor="0.9",
    ),
    Package(
        name="sentencepiece",
        module="sentencepiece",
        use="--tokenizer-type SentencePieceTokenizer",
        floor="0.2.3",
    ),
    Package(name="tensorboard", module="tensorboard", use="--tensorboard-dir"),
    Package(name="wandb", module="wandb", use="--wandb-project"),
    Package(name="mlflow-skinny", module="mlflow", use="--mlflow-experiment"),
)


def package_of_kernel(op: str, backend: str) -> Package | None:
    """Return the package that a backend of an op needs; None if it needs no optional package."""
    return next((package for package in PACKAGES if f"{op}.{backend}" in package.kernels), None)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for example (2, 11, 0) for ``2.11.0a0+git``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def old_package(name: str) -> tuple[str, str] | None:
    """Return a clause about an installed package that is older than its floor, and the command that
    helps; None if it is absent or new enough.
    """
    package = next(package for package in PACKAGES if package.name == name)
    old = package.too_old()
    return (old, package.command) if old else None


@contextmanager
def required_packages(*, any_version: bool = False) -> Iterator[None]:
    """Exit with code 2 and one sentence if a required package is too old, or if an import of
    the block finds a required package absent.

    Args:
        any_version: do not check the versions of packages.
    Raises:
        ModuleNotFoundError: another module is absent.
        SystemExit: a required package is absent or too old.
    """
    old = [
        package
        for package in PACKAGES
        if package.required and not any_version and package.too_old()
    ]
    if old:
        wanted = " ".join(f"'{package.name}>={package.floor}'" for package in old)
        print(
            f"{sys.executable} has {', and '.join(package.too_old() for package in old)}; "
            f"run pip install {wanted}.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    try:
        yield
    except ModuleNotFoundError as error:
        package = next(
            (package for package in PACKAGES if package.required and package.module == error.name),
            None,
        )
        if package is None:
            raise
        print(
            f"{package.name} is not installed for {sys.executable}; activate the environment of "
            "megatron_packed, or run `megatron-packed doctor`, which lists what is missing.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing the module or its parent packages.

    A directory without code, for example the directory in which W&B stores its files, is not a
    package.
    """
    first, *submodules = module.split(".")
    spec = importlib.util.find_spec(first)
    for name in submodules:
        if spec is None:
            return False
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None and spec.origin is not None


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """Unrelated package that users install by mistake."""

    name: str
    what: str
    meant: str
    """Name, in `PACKAGES`, of the package that the user wanted; empty if it is this project."""
    versions: str = ""
    """Pattern of the versions that are the unrelated package."""
    in_the_way: bool = False
    """True if the unrelated package has the module name of the wanted package, so that both cannot
    be installed.
    """

    @property
    def fix(self) -> str:
        """Command that removes the package and, if useful, installs the wanted package.

        A wanted package that has no wheel and is rarely needed is not installed.
        """
        away = f"pip uninstall -y {self.name}"
        package = next(
            (package for package in PACKAGES if package.name == self.meant and not self.in_the_way),
            None,
        )
        return away if package is None else f"{away} && {package.command}"


STRANGERS = (
    Stranger(
        name="apex",
        versions=r"0\.9",
        meant="apex",
        in_the_way=True,
        what=(
            "a toolkit of 2013 for the web framework Pyramid; NVIDIA's apex is not on a "
            "package index"
        ),
    ),
    Stranger(
        name="apex-personal",
        meant="apex",
        in_the_way=True,
        what="an unofficial copy of NVIDIA's apex, of 2023",
    ),
    Stranger(
        name="mamba",
        meant="mamba-ssm",
        what=("a test runner; the kernels of Mamba layers are in mamba-ssm"),
    ),
    Stranger(name="megatron", meant="", what="a library of 2019 for NumPy features"),
    Stranger(
        name="flash-attention",
        meant="flash-attn",
        what="a port to Huawei's Ascend; the package for CUDA is flash-attn",
    ),
)


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is absent or unrecorded."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def strangers() -> list[tuple[Stranger, str]]:
    """Return the installed unrelated packages with their versions."""
    installed = [(stranger, version_of(stranger.name)) for stranger in STRANGERS]
    return [
        (candidate, version)
        for candidate, version in installed
        if version is not None and re.match(candidate.versions, version)
    ]
