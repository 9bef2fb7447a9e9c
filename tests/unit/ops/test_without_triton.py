"""A CPU needs no Triton: what runs there, and the estimates that every run makes, import none of it."""

import subprocess
import sys
from pathlib import Path

OPS = Path(__file__).parents[3] / "megatron_packed" / "ops"
PROGRAM = """\
import sys
from importlib import import_module

sys.modules["triton"] = None  # an import raises ModuleNotFoundError
for name in sys.argv[1:]:
    import_module(name)
"""


def test_references_and_stand_ins_import_no_triton() -> None:
    files = [*OPS.glob("*/on_meta.py"), *OPS.glob("*/reference.py"), *OPS.glob("*/api.py")]
    names = [f"megatron_packed.ops.{file.parent.name}.{file.stem}" for file in files]
    assert "megatron_packed.ops.grouped_mlp.on_meta" in names
    names += ["megatron_packed.ops.permute.gathers", "megatron_packed.models.lora"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-1000:]
