"""``megatron-packed doctor`` on this machine, with made-up answers of probes, and with unrelated
packages of similar names.
"""

import ctypes
import json
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from megatron_packed.cli.doctor import command, gpu, machine, probe, supervise
from megatron_packed.cli.doctor.supervise import run_probes
from megatron_packed.cli.main import main
from megatron_packed.config import optional_packages
from megatron_packed.config.optional_packages import PACKAGES, strangers
from megatron_packed.explain.capability import Capability
from megatron_packed.ops.varlen_attention import sdpa
from megatron_packed.optim.adamw_multi_tensor import stranger_by_its_name


def install(folder, name, version, *files):
    """Create the files of an installed distribution, as pip does."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def answers(**changes):
    """Return the answers of all probes for a GPU on which everything works, with ``changes``."""
    every = {f"import:{package.module}": {"version": "1.0"} for package in PACKAGES}
    backends = {
        "varlen_attention": ["flash_attn_4", "transformer_engine", "flash_attn_2", "reference"],
        "ssd": ["mamba_ssm", "reference"],
        "gated_delta_rule": ["triton", "reference"],
        "causal_conv1d": ["triton", "causal_conv1d", "reference"],
        "adamw": ["torch", "transformer_engine", "apex"],
        "layers": ["local", "transformer_engine"],
    }
    ops = {
        op: {"chosen": names[0], "reasons": {name: [] for name in names}}
        for op, names in backends.items()
    }
    every |= {"kernels": {"device": "cuda", "ops": ops}, "gpu": {"findings": []}}
    ran = {"seconds": 0.5, "difference": 1e-3}
    every |= {f"kernel:{op}.{name}": ran for op, names in backends.items() for name in names}
    for package in PACKAGES:
        every |= {f"kernel:{name}": ran for name in package.kernels}
    return {**every, **changes}


def answer(monkeypatch, made_up):
    """Let the probes give made-up answers."""
    monkeypatch.setattr(
        command, "run_probes", lambda names, *_: {name: made_up[name] for name in names}
    )


@pytest.fixture
def examined(monkeypatch, capsys):
    """Return a function that gives the exit code and the lines by name for made-up answers."""

    def examine(made_up):
        answer(monkeypatch, made_up)
        code = main(["doctor", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] == (code == 0)
        return code, {
            one["name"]: one for kind in ("packages", "kernels", "machine") for one in found[kind]
        }

    return examine


def test_this_machine(capsys):
    assert main(["doctor", "--no-kernels"]) == 0
    text = capsys.readouterr().out
    assert "PACKAGES" in text and "KERNELS" in text and "clock" in text
    assert text.startswith("Ready for training on ") and "no installed package is broken.\n" in text
    lines = [line.split() for line in text.splitlines()]
    assert next(words[1] for words in lines if words[:1] == ["torch"]) == "found"


def test_a_gpu_where_all_works(examined):
    code, lines = examined(answers())
    assert (
        code == 0
        and lines["mamba-ssm"]["state"] == "works"
        and lines["ssd"]["found"] == "mamba_ssm"
    )
    assert lines["flash-attn"]["instead"] == "varlen_attention: flash_attn_4"


GPU = Capability(name="GPU 0", state="works", found="NVIDIA H200, 139 GiB, capability 9.0")
NO_TORCH = {"import:torch": {"absent": True}}
NO_GPU = Capability(name="CUDA", state="absent", detail="torch 2.13 is built for CPUs only")
SLOW = {"ssd": {"chosen": "reference", "reasons": {"mamba_ssm": ["missing"], "reference": []}}}


@pytest.mark.parametrize(
    ("gpu", "changes", "first"),
    [
        (GPU, {}, "Ready for training on 1 GPU (NVIDIA H200); no installed package is broken."),
        (
            GPU,
            NO_TORCH,
            "Not ready for training: torch is missing or broken; run pip ",
        ),
        (
            GPU,
            {"kernel:ssd.mamba_ssm": {"error": "SIGSEGV"}},
            "Ready for training on 1 GPU (NVIDIA H200), with 2 problems:",
        ),
        (
            GPU,
            {"kernels": {"device": "cuda", "ops": SLOW}},
            "Ready for training on 1 GPU (NVIDIA H200), but ssd would run slow reference kernels; "
            "see KERNELS.",
        ),
        (
            NO_GPU,
            {},
            "Ready for training on the CPU only (torch 2.13 is built for CPUs only); no installed "
            "package is broken.",
        ),
    ],
)
def test_the_first_line_is_the_verdict(gpu, changes, first, monkeypatch, capsys):
    """The verdict comes before the details: on which device this machine can train."""
    made_up = answers(gpu={"findings": [gpu]}, **changes)
    answer(monkeypatch, made_up)
    main(["doctor"])
    assert capsys.readouterr().out.splitlines()[0].startswith(first)


def test_a_package_with_two_kernels_of_an_op_names_the_replacement_once(examined):
    experts = {"chosen": "reference", "reasons": {"quack": ["missing"], "reference": []}}
    made_up = answers(**{"import:quack": {"absent": True}})
    made_up["kernels"]["ops"]["grouped_mlp"] = experts
    assert examined(made_up)[1]["quack-kernels"]["instead"].split(", ") == [
        "grouped_mlp: reference"
    ]


def test_what_is_absent_is_named_with_what_replaces_it(examined):
    made_up = answers(
        **{"import:flash_attn.cute": {"absent": True}, "import:apex": {"absent": True}}
    )
    attention = made_up["kernels"]["ops"]["varlen_attention"]
    attention |= {
        "chosen": "transformer_engine",
        "reasons": {**attention["reasons"], "flash_attn_4": ["missing"]},
    }
    code, lines = examined(made_up)
    assert code == 0
    missing = lines["flash-attn-4"]
    assert (
        missing["state"] == "slower"
        and missing["instead"] == "varlen_attention: transformer_engine"
    )
    assert missing["fix"] == "pip install --pre flash-attn-4"
    assert (
        lines["apex"]["state"] == "absent" and not lines["apex"]["fix"]
    )  # torch's AdamW has a higher priority in any case


@pytest.mark.parametrize(
    "changes, name, words",
    [
        ({"kernel:ssd.mamba_ssm": {"error": "killed by SIGSEGV"}}, "mamba-ssm", "SIGSEGV"),
        (
            {"import:causal_conv1d": {"error": "ImportError: undefined symbol"}},
            "causal-conv1d",
            "undefined symbol",
        ),
        ({"import:numpy": {"absent": True}}, "numpy", "no module numpy"),
        ({"import:apex": {"stranger": "not NVIDIA's"}}, "apex", "not NVIDIA's"),
    ],
)
def test_what_is_broken_ends_with_1_and_has_a_command(examined, changes, name, words):
    code, lines = examined(answers(**changes))
    assert code == 1 and lines[name]["state"] in ("broken", "wrong")
    assert words in lines[name]["detail"] and lines[name]["fix"].startswith("pip ")
    if name == "mamba-ssm":
        assert (
            lines["ssd"]["instead"] == "reference"
            and "--ssd-backend reference" in lines["ssd"]["fix"]
        )


def test_what_a_plain_reference_costs_is_said(examined):
    made_up = answers()
    made_up["kernels"]["ops"]["ssd"] |= {
        "chosen": "reference",
        "cost": ", 13 times as long as triton",
    }
    _, lines = examined(made_up)
    assert lines["ssd"]["state"] == "slower" and lines["ssd"]["detail"].startswith(
        "13 times as long as triton"
    )


def test_a_cudnn_that_torch_refuses_costs_its_own_line(monkeypatch):
    """A wrong cuDNN on a container's library path gives one finding; GPUs and kernels are still
    examined.
    """

    def version():
        raise RuntimeError(
            "cuDNN version incompatibility: compiled against (9, 19, 0)\nbut found (9, 14, 0)"
        )

    monkeypatch.setattr(gpu.torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu.torch.backends.cudnn, "version", version)
    for part in ("_nccl", "_gpu", "_pinned"):
        monkeypatch.setattr(gpu, part, lambda *_, part=part: Capability(name=part, state="works"))
    found = {one.name: one for one in gpu.gpu_findings()}
    assert list(found) == ["CUDA", "cuDNN", "_nccl", "_gpu", "_pinned"]
    assert (
        found["cuDNN"].state == "slower"
        and "(9, 19, 0)" in found["cuDNN"].detail
        and found["cuDNN"].fix
    )


@pytest.mark.parametrize(
    "total, bits, state, words",
    [
        (1024, 0, "works", "clock 1200 of 1980 MHz"),
        (
            1024,
            0x1 | 0x4,
            "works",
            "clock 1200 of 1980 MHz",
        ),  # bits for an idle GPU and for the usual power cap
        (1024, 0x8 | 0x60, "slower", "lowered by its temperature and the hardware"),
        (1023, 0, "broken", "1,024 ones add up to 1023"),
        (1025, 0, "broken", "1,024 ones add up to 1025"),
    ],
)
def test_a_gpu_that_is_held_down_or_adds_wrongly(monkeypatch, total, bits, state, words):
    properties = SimpleNamespace(
        name="H200", total_memory=140 * 2**30, major=9, minor=0, uuid="1-2"
    )
    monkeypatch.setattr(gpu.torch.cuda, "get_device_properties", lambda number: properties)
    monkeypatch.setattr(gpu.torch, "ones", lambda count, device: torch.full((1,), total))
    library = SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1-2": "handle"}[uuid],
        nvmlDeviceGetClockInfo=lambda handle, kind: 1200,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: bits,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = gpu._gpu(3)
    assert (found.name, found.state, found.found) == (
        "GPU 3",
        state,
        "H200, 140 GiB, capability 9.0",
    )
    assert found.detail.endswith(words)


STRANGERS = {"mamba": "0.11.3", "megatron": "0.5.1", "flash-attention": "1.0.0"}
"""Packages with names that other packages are known by, and their versions."""


@pytest.fixture
def site_of_strangers(tmp_path, monkeypatch):
    """Return a folder of installed packages that are none of those that the names suggest."""
    install(tmp_path, "apex", "0.9.10.dev0", "apex/__init__.py")
    for name, version in STRANGERS.items():
        install(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_strangers_are_found_by_their_metadata(site_of_strangers):
    assert {stranger.name for stranger, _ in strangers()} == {"apex", *STRANGERS}


def test_a_stranger_is_found_by_its_import_too(site_of_strangers):
    assert probe.answer_to("import:apex")["stranger"] == stranger_by_its_name() is not None


def test_a_stranger_beside_the_real_package_is_no_problem(site_of_strangers, examined):
    install(site_of_strangers, "flash-attn", "2.8.3")
    _, lines = examined(answers())
    assert lines["flash-attention"]["state"] == "found" and not lines["flash-attention"]["fix"]


def test_a_stranger_is_a_problem_with_the_package_to_install(site_of_strangers, examined):
    code, lines = examined(answers())
    fix = lines["mamba"]["fix"]
    assert code == 1 and fix.startswith("pip uninstall -y mamba && ") and "mamba-ssm" in fix


def test_an_unrelated_apex_excludes_that_of_nvidia(site_of_strangers):
    [apex] = [one for one in command._strangers() if one.name == "apex"]
    assert apex.state == "wrong" and apex.fix == "pip uninstall -y apex"


def test_nvidias_apex_is_no_stranger(tmp_path, monkeypatch):
    install(tmp_path, "apex", "0.1", "apex/__init__.py", "apex/multi_tensor_apply/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert strangers() == [] and stranger_by_its_name() is None


@pytest.mark.parametrize("given", [None, "/own/ptxas"])
def test_probes_compile_by_the_ptxas_of_a_run(tmp_path, monkeypatch, given):
    (tmp_path / "environment_probe.py").write_text(
        "import os, sys\n"
        "from multiprocessing.connection import Connection\n"
        "pipe = Connection(int(sys.argv[1]))\n"
        "for name in sys.argv[2:]:\n"
        "    pipe.send({'path': os.environ['TRITON_PTXAS_PATH']})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    if given is not None:
        monkeypatch.setenv("TRITON_PTXAS_PATH", given)
    chosen = {"TRITON_PTXAS_PATH": "/new/ptxas"}
    monkeypatch.setattr(supervise, "assembler_variables", lambda: chosen)
    found = run_probes(["a"], 30.0, module="environment_probe")
    assert found == {"a": {"path": given or "/new/ptxas"}}


def test_a_probe_that_crashes_or_hangs_costs_its_own_line(tmp_path, monkeypatch):
    (tmp_path / "fragile.py").write_text(
        textwrap.dedent("""
        import os, sys, time
        from multiprocessing.connection import Connection
        pipe = Connection(int(sys.argv[1]))
        for name in sys.argv[2:]:
            if name == "crash":
                print("out of luck", file=sys.stderr, flush=True)
                os.abort()
            if name == "hang":
                time.sleep(600)
            pipe.send({"name": name, "last": name == "lost"})
            if name == "lost":
                break
    """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run_probes(["a", "crash", "b", "lost", "c", "hang", "d"], 3.0, module="fragile")
    assert list(found) == ["a", "crash", "b", "lost", "c", "hang", "d"]
    assert all(found[name]["name"] == name for name in ("a", "b", "lost", "c", "d"))
    assert found["crash"]["error"] == "the process was killed by SIGABRT: out of luck"
    assert found["hang"]["error"] == "no answer in 3 s"


def test_a_kernel_that_computes_something_else_is_reported(monkeypatch):
    assert probe.answer_to("kernel:varlen_attention.sdpa")["difference"] < 1e-5
    right = sdpa.run
    monkeypatch.setattr(sdpa, "run", lambda *tensors, **options: right(*tensors, **options) * 1.5)
    assert (
        "difference of its results to the reference"
        in probe.answer_to("kernel:varlen_attention.sdpa")["error"]
    )
    assert probe.answer_to("kernel:adamw.torch")["difference"] < 1e-5
    assert (
        "mamba_ssm" in probe.answer_to("kernel:ssd.mamba_ssm")["error"]
    )  # on a CPU the kernel fails, whether the package is installed or not


def test_limits_of_a_container(monkeypatch, tmp_path):
    usage = type("Usage", (), {"total": 2**26, "free": 2**26})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (1024, 1024))
    lines = {one.name: one for one in machine.machine_findings()}
    assert {lines[name].state for name in ("shared memory", "locked memory", "open files")} == {
        "slower"
    }
    assert lines["open files"].fix == "ulimit -n 65536" and lines["shared memory"].found.startswith(
        "0.0625 GiB"
    )
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n"
    )
    assert machine._driver(tmp_path / "version").found == "580.95.05"


def test_limits_that_are_high_enough(monkeypatch):
    """Limits that are exactly high enough or unlimited are accepted, even if the shared memory is
    in use.
    """
    usage = type("Usage", (), {"total": machine.SHARED_MEMORY, "free": 0})
    limits = {
        machine.resource.RLIMIT_MEMLOCK: machine.resource.RLIM_INFINITY,
        machine.resource.RLIMIT_NOFILE: 4096,
    }
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (limits[kind],) * 2)
    lines = {one.name: one for one in machine.machine_findings()}
    assert {lines[name].state for name in ("shared memory", "locked memory", "open files")} == {
        "works"
    }
    assert lines["locked memory"].found == "unlimited (at most unlimited)"


class Timex(ctypes.Structure):
    """``struct timex`` of adjtimex(2), up to the field ``status``."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "max", "est")),
        ("status", ctypes.c_int),
    )


@pytest.mark.parametrize(
    "answer, status, state", [(0, 0x01, "works"), (5, 0x41, "slower"), (-1, 0, "found")]
)
def test_a_clock_that_no_service_sets(monkeypatch, answer, status, state):
    def adjtimex(timex):
        ctypes.cast(timex, ctypes.POINTER(Timex)).contents.status = status
        return answer

    monkeypatch.setattr(
        machine.ctypes, "CDLL", lambda *_, **options: SimpleNamespace(adjtimex=adjtimex)
    )
    assert machine._clock().state == state


def test_without_a_terminal_a_line_now_and_then_says_what_runs(monkeypatch, capsys):
    monkeypatch.setattr(command, "LINE_EVERY", 0.5)
    clock = iter([0.0, 0.4, 0.6, 0.6, 1.0, 1.2, 1.2])
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    begins = command._announcer()
    for name in ("gpu", "kernels", "kernel:rope.triton", "kernel:ssd.mamba_ssm"):
        begins(name)
    assert capsys.readouterr().err == (
        "Still examining this machine: choosing kernels ...\n"
        "Still examining this machine: running the kernel mamba_ssm of ssd ...\n"
    )


@pytest.mark.parametrize("name", [f"import:{package.module}" for package in PACKAGES])
def test_progress_names_what_is_imported(name):
    assert command._activity(name) == f"importing {name.removeprefix('import:')}"


def test_a_missing_package_is_named_once_and_a_shared_reason_is_given_once(monkeypatch, capsys):
    absent, no_gpu = ["No module named 'triton'"], ["it needs a CUDA device"]
    made_up = answers(**{"import:triton": {"absent": True}})
    ops = made_up["kernels"]["ops"]
    for op in ("ssd", "gated_delta_rule", "causal_conv1d", "rope"):
        ops[op] = {"chosen": "reference", "reasons": {"triton": absent, "reference": []}}
    ops["ssd"]["reasons"] = {"triton": absent, "own": no_gpu, "reference": []}
    ops["rope"]["reasons"] = {"triton": absent, "own": no_gpu, "reference": []}
    made_up["kernels"]["device"] = "cpu"
    monkeypatch.setattr(command, "version_of", lambda name: None)
    answer(monkeypatch, made_up)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    _, _, kernels = text.partition("KERNELS (without backends of packages that are not installed)")
    assert kernels and "triton" not in kernels and "No module named" not in text
    assert text.count("own: it needs a CUDA device") == 1 and text.count("own: as for ssd") == 1
    # The import of an installed package may fail in one of its kernels alone.
    made_up["import:triton"] = {"version": "3.6"}
    main(["doctor", "--json"])
    kernels = {one["name"]: one for one in json.loads(capsys.readouterr().out)["kernels"]}
    assert kernels["ssd"]["detail"].startswith("triton: No module named 'triton' | own: it needs")
    assert kernels["rope"]["detail"] == "triton: as for ssd | own: as for ssd"


def test_a_package_below_its_floor_is_a_problem(examined, monkeypatch):
    monkeypatch.setattr(
        optional_packages, "version_of", lambda name: "3.1.5" if name == "jinja2" else None
    )
    code, lines = examined(answers())
    assert code == 1 and lines["jinja2"]["state"] == "wrong"
    assert lines["jinja2"]["detail"] == "jinja2 3.1.5, which is older than 3.1.6"
    assert lines["jinja2"]["fix"] == "pip install 'jinja2>=3.1.6'"


@pytest.mark.parametrize(
    ("printed", "state"),
    [("", "works"), ("the kernel permits no filter of system calls (Invalid argument)", "absent")],
)
def test_the_system_call_filter_is_reported(examined, monkeypatch, printed, state):
    monkeypatch.setattr(machine, "_FILTER_PROGRAM", f"print({printed!r})")
    code, lines = examined(answers())
    found = lines["system-call filter"]
    assert code == 0 and found["state"] == state and found["detail"] == printed
