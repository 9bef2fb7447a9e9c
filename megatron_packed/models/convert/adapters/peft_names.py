"""Names of tensors in a file of adapters of PEFT, and the factors' form there.

The file has ``lora_A`` ``(r, I)`` and ``lora_B`` ``(O, r)`` of each module. Adapters of a parameter
with E matrices have ``(E r, I)``, in which the number of the expert is slow, and ``(O, r E)``, in which
it is fast. If two parameters of one module have adapters, then those of the first one are inside, so
their names have ``.base_layer``. Source: PEFT 0.21.2, ``tuners.lora.layer.ParamWrapper``.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_packed.models.convert.adapters.factors import Factors

PREFIX = "base_model.model."
INNER = ".base_layer"
A_WEIGHT, B_WEIGHT = ".lora_A.weight", ".lora_B.weight"


def stems(modules: Iterable[str], parameters: Iterable[str]) -> dict[str, str]:
    """Return the names before ``.lora_A.weight`` by the path of a module or parameter.

    Args:
        modules: paths of modules with an adapter.
        parameters: paths of parameters with adapters, in the order in which transformers makes them.
    """
    found = {path: PREFIX + path for path in modules}
    inner: dict[str, list[str]] = {}
    for path in parameters:
        inner.setdefault(path.rpartition(".")[0], []).append(path)
    for module, paths in inner.items():
        for depth, path in enumerate(reversed(paths)):
            found[path] = PREFIX + module + INNER * depth
    return found


def flat(experts: Factors) -> Factors:
    """Return the factors of experts, ``(E, r, I)`` and ``(E, O, r)``, as the file has them."""
    return Factors(experts.A.flatten(0, 1), experts.B.permute(1, 2, 0).flatten(1))


def unflat(factors: Factors, experts: int) -> Factors:
    """Return the factors of E experts from those of a file; inverts `flat`."""
    B_OrE = factors.B.view(factors.B.shape[0], -1, experts)
    A_ErI = factors.A.view(experts, -1, factors.A.shape[1])
    return Factors(A_ErI, B_OrE.permute(2, 0, 1).contiguous())
