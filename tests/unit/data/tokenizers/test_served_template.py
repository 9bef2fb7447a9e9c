"""Templates for servers: transformers prints with them what the training printed."""

import json

import pytest

from megatron_packed.cli.export_trained import trained_templates
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.chat_format import OWN_TEMPLATES
from megatron_packed.data.tokenizers.chat_template import (
    TemplateRenderer,
    unmarked,
)
from megatron_packed.data.tokenizers.prompt_formats import DEFAULT_TEMPLATE, FORMATS_BY_NAME
from megatron_packed.data.tokenizers.served_template import served_template
from support.messages import assistant, system, user

MESSAGES = [
    system("Be brief."),
    user(" a "),
    assistant("b\n"),
    user("c"),
    assistant("d"),
]
SPACES = """
{% for message in messages %}
  {{ message.role }}:
  {%+ generation %}
  {{ message.content }} {% if true %}x{% endif %}
  {% endgeneration -%}

  end
  {%- generation +%}
 {{ message.content }}
{%-endgeneration%}
{% endfor %}
"""
SETS = """
{%- set word = 'outer' -%}
{%- for m in messages -%}
{% generation %}{% set word = m.content %}{{ word }}{% endgeneration %}{{ word }}
{%- endfor %}"""
VARIABLES = """

{%- macro shown(text) %}{{ text }}{{ mood }}{% endmacro %}
{%- for m in messages %}{{ shown(m.content) }}{{ mood }}{{ '!' if loud else '.' }}{{ bos_token }}{% endfor %}
{{ list | tojson }}"""
KWARGS = {
    "mood": 'a "quoted" \\ text %} with ü\n',
    "loud": False,
    "bos_token": "<own>",
    "list": [1, 2.5e-7, None, {"a": True}],
    "no name": 1,
    "not": 2,
    "unused": "x",
}
TEMPLATES = {
    "chatml": DEFAULT_TEMPLATE,
    **{name: form.template for name, form in FORMATS_BY_NAME.items() if form.template},
    "spaces": SPACES,
    "sets": SETS,
    "variables": VARIABLES,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_prints_the_text_of_the_training(name):
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    source, variables = TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}
    ours = TemplateRenderer(source, {**variables, **KWARGS}, [])
    served = served_template(source, json.dumps(KWARGS), defined=variables)
    assert "generation" not in served.replace("add_generation_prompt", "")
    for count in range(1, len(MESSAGES) + 1):
        for prompt in (False, True):
            expected = unmarked(ours.render(MESSAGES[:count], None, prompt=prompt))
            [[found], _] = render_jinja_template(
                [MESSAGES[:count]],
                chat_template=served,
                add_generation_prompt=prompt,
                **variables,
            )
            assert found == expected


def test_a_server_can_set_other_variables():
    served = served_template("{{ mood }}{{ style }}", '{"mood": "sad"}')
    assert TemplateRenderer(served, {"mood": "glad"}, []).render([], None) == "glad"
    assert TemplateRenderer(served, {"style": "short"}, []).render([], None) == "sadshort"


def test_a_template_that_a_server_can_run_stays_as_it_is():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert served_template(plain, '{"enable_thinking": false}') == plain


def test_an_exported_template_of_this_project_names_no_flag():
    tokenizer = ByteTokenizer()
    for source in OWN_TEMPLATES:
        tokenizer.chat_template = source
        served = trained_templates(DataConfig(data_path=("d",), sft=True), tokenizer)
        assert served is not None and "--" not in served.default
        assert ("prints no tool" in served.default) == ("prints no tool" in source)
    assert any("--" in source for source in OWN_TEMPLATES)
