"""Templates that try to leave jinja2's sandbox, and the system-call filter without the sandbox."""

import struct
import subprocess
import sys

import pytest

from megatron_packed.data.errors import BadLine
from megatron_packed.data.tokenizers import chat_template, system_call_filter
from megatron_packed.data.tokenizers.chat_template import TemplateError, TemplateRenderer
from megatron_packed.data.tokenizers.conversation_documents import RenderingRules
from megatron_packed.data.tokenizers.limited_process import Budget, GuardedObject, Limits
from megatron_packed.data.tokenizers.template_process import TemplateProcess

MESSAGES = [{"role": "user", "content": "x"}]
GLOBALS = "'{0.__init__.__globals__}'"
PAYLOADS = [
    # CVE-2025-27516, with which jinja2 3.1.5 printed globals and environment, and variants
    "{{ (" + GLOBALS + " | attr('format'))(cycler) }}",
    "{{ (['{0.__init__.__globals__[os].environ}'] | map('attr','format') | list)[0](cycler) }}",
    "{{ (" + GLOBALS + " | attr('for' ~ 'mat'))(cycler) }}",
    "{{ (" + GLOBALS + " | attr(['format'] | first))(cycler) }}",
    "{{ ('{x.__init__.__globals__}' | attr('format_map'))({'x': cycler}) }}",
    "{{ ([" + GLOBALS + "] | map(attribute='format') | list)[0](cycler) }}",
    # CVE-2024-56326: a reference to str.format
    "{{ " + GLOBALS + ".format(cycler) }}",
    "{% set f = " + GLOBALS + ".format %}{{ f(cycler) }}",
    "{{ [" + GLOBALS + "] | map('format', cycler) | list }}",
    "{{ '%s' | format(cycler.__init__.__globals__) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ cycler['__init__']['__globals__'] }}",
    "{{ cycler | attr('__init__') }}",
    "{{ [cycler] | map(attribute='__init__') | list }}",
    "{{ joiner.__init__.__globals__.os.environ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ '' | attr('__class__') }}",
    "{{ dict.__base__ }}",
    "{{ ''.join.__self__.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ messages.__reduce_ex__(2) }}",
    "{{ messages | map('attr', 'pop') | list }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
]
OS = "cycler.__init__.__globals__.os"
BUILTINS = "cycler.__init__.__globals__['__builtins__']"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_template_leaves_the_sandbox(payload: str) -> None:
    """A payload is refused, or an attribute that the sandbox hides prints nothing."""
    try:
        text = TemplateRenderer(payload, {}, []).complete_text(MESSAGES)
    except (TemplateError, BadLine):
        return
    assert text in ("", "[Undefined]")


def test_the_filter_attr_still_reads_what_a_dot_reads() -> None:
    template = "{{ ('a b' | attr('upper'))() }}|{{ {} | attr('missing') is undefined }}"
    assert TemplateRenderer(template, {}, []).complete_text(MESSAGES) == "A B|True"


def unguarded(expression: str) -> str:
    """Render an expression in a process without jinja2's sandbox; return its text or its error."""
    arguments = ["{{ " + expression + " }}", {}, [], None, RenderingRules()]
    budget = Budget("the template", "conversations", "give another", max_in_a_row=3)
    template = GuardedObject(
        "support.unguarded_template", arguments, Limits(), budget, "template_limit"
    )
    try:
        return str(template.call("complete_text", MESSAGES, None)[0])
    except BadLine as error:
        return error.detail
    finally:
        template.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is a part of Linux")
@pytest.mark.parametrize(
    "act",
    [
        f"{BUILTINS}.open('/etc/passwd').read()",
        f"{BUILTINS}.open('/proc/self/environ').read()",
        f"{OS}.listdir('/')",
        f"{OS}.stat('/etc/passwd')",
        f"{OS}.getcwd()",
        f"{OS}.unlink('/nothing')",
        f"{OS}.fork()",
        f"{OS}.execv('/bin/true', ['true'])",
        f"{OS}.posix_spawn('/bin/true', ['true'], {{}})",
        f"{OS}.kill({OS}.getpid(), 0)",
        f"{OS}.memfd_create('x')",
        f"{OS}.pidfd_open({OS}.getpid())",
    ],
)
def test_code_without_a_sandbox_reaches_nothing(act: str) -> None:
    assert "PermissionError" in unguarded(act)


def test_code_without_a_sandbox_finds_no_environment(monkeypatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/secret")
    found = unguarded(f"{OS}.environ.items() | map('first') | sort | join(' ')")
    assert set(found.split()) <= system_call_filter._KEPT
    assert unguarded("1 + 1") == "2"


CHILD = """
import os, signal, threading
from megatron_packed.data.tokenizers.system_call_filter import restrict_process
print(repr(restrict_process()), flush=True)
started = []
thread = threading.Thread(target=started.append, args=(1,))
thread.start(); thread.join()
print(started, flush=True)
os.abort()
"""


def test_threads_and_abort_still_work() -> None:
    """Libraries start threads, and a failed allocation in Rust ends its own process."""
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["''", "[1]"] and ran.returncode == -6


def test_where_the_kernel_refuses_the_reason_is_returned(monkeypatch) -> None:
    monkeypatch.setattr(system_call_filter.os, "environ", {})
    monkeypatch.setattr(system_call_filter.platform, "machine", lambda: "riscv64")
    assert system_call_filter.restrict_process() == "no filter of system calls for linux on riscv64"


@pytest.mark.parametrize("machine", system_call_filter._MACHINES.values())
def test_filters_have_one_entry_for_each_call(machine) -> None:
    """Each jump of a filter leads to an instruction, and the filter ends with a refusal."""
    instructions = system_call_filter._filter(machine, 7)
    for place, (code, yes, no, _) in enumerate(instructions):
        if code != system_call_filter._RETURN:
            assert place + 1 + max(yes, no) < len(instructions)
    assert instructions[-1][0] == system_call_filter._RETURN
    numbers = [numbers[machine.column] for numbers in system_call_filter._ALLOWED.values()]
    assert len(set(numbers)) == len(numbers)
    assert all(len(struct.pack("=HBBI", *one)) == 8 for one in instructions)


def test_an_old_jinja2_compiles_no_template(monkeypatch) -> None:
    old = ("jinja2 3.1.5, which is older than 3.1.6", "pip install 'jinja2>=3.1.6'")
    monkeypatch.setattr(chat_template, "_OLD_JINJA", old)
    with pytest.raises(
        TemplateError, match=r"jinja2 3\.1\.5, which is older than 3\.1\.6; run pip"
    ):
        TemplateRenderer("{{ 1 }}", {}, [])


def test_the_process_of_a_template_refuses_an_old_jinja2(tmp_path, monkeypatch) -> None:
    """The process finds the version before it can no longer read files."""
    info = tmp_path / "jinja2-3.1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jinja2\nVersion: 3.1.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TemplateError, match=r"jinja2 3\.1\.5, which is older"):
        TemplateProcess("{{ 1 }}", {}, [])
