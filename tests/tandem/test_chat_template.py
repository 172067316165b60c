"""Chat templates: what models expect of the environment, and what strangers' programs may not do."""

from __future__ import annotations

import json

import pytest

from tandem.chat_template import MAX_SOURCE_CHARS, ChatTemplate
from tandem.errors import InvalidRequest, ModelError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, str]] | None = None, **limits: float) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, **limits).render(messages or CHAT)  # type: ignore[arg-type]


def test_blocks_leave_no_lines_and_no_indentation_behind() -> None:
    source = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content }}]\n    {% endif %}\n{% endfor %}\n"
    )
    assert render(source) == "[hi]\n"


def test_special_tokens_and_the_generation_prompt_are_given() -> None:
    assert render("{{ bos_token }}{% if add_generation_prompt %}A:{% endif %}{{ eos_token }}") == "<s>A:</s>"


def test_tools_are_none_so_that_templates_can_ask() -> None:
    assert render("{{ tools is none }} {{ documents is none }} {{ unknown is defined }}") == "True True False"


def test_break_and_continue_work() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(source) == "02"


def test_generation_blocks_are_transparent() -> None:
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_tojson_does_not_escape_for_html_and_takes_an_indent() -> None:
    value = {"a": "<é>"}
    assert render("{{ {'a': '<é>'} | tojson }}") == json.dumps(value, ensure_ascii=False)
    assert render("{{ {'a': '<é>'} | tojson(indent=2) }}") == json.dumps(value, ensure_ascii=False, indent=2)


def test_strftime_now_gives_the_date() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_namespaces_dicts_and_macros_work() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% macro twice(x) %}{{ x ~ x }}{% endmacro %}{{ twice(ns.n) }}{{ dict(a=1)['a'] }}"
    )
    assert render(source) == "221"


def test_raise_exception_reaches_the_client_in_the_templates_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__bases__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].clear() }}",
        "{{ namespace(__call__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_messages_are_not_changed_by_rendering() -> None:
    chat = [dict(message) for message in CHAT]
    render("{% for m in messages %}{{ m.items() | list }}{% endfor %}", chat)
    assert chat == CHAT


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 2**999999999 }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '%(a)999999999d' | format(a=1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(20) %}{% set n.x = [n.x] * 9 %}{% endfor %}{{ n.x | tojson }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    ],
)
def test_a_template_cannot_build_something_huge(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"characters|count"):
        render(source, timeout_s=100.0)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% if i %}{% endif %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_runs_too_long_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest, match="takes too long"):
        render(source, timeout_s=0.1)


def test_endless_recursion_is_an_error_of_the_template() -> None:
    with pytest.raises(InvalidRequest, match="RecursionError"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


@pytest.mark.parametrize("source", ["{{ nothing.at.all }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ 'a' | no_filter }}"])
def test_a_template_that_fails_names_the_reason(source: str) -> None:
    with pytest.raises((InvalidRequest, ModelError), match="chat template"):
        render(source)


def test_a_template_of_great_length_is_refused_unread() -> None:
    with pytest.raises(ModelError, match=str(MAX_SOURCE_CHARS)):
        ChatTemplate("x" * (MAX_SOURCE_CHARS + 1), {})


def test_the_format_filter_and_tojson_do_what_jinja_and_json_do() -> None:
    assert render("{{ '%s and %03d' | format('a', 7) }}") == "a and 007"
    assert render("{{ '%(x)s' | format(x=1) }}") == "1"
    assert render("{{ {'b': [1, none, 'é'], 'a': {}} | tojson }}") == '{"b": [1, null, "é"], "a": {}}'
    assert render("{{ {'a': [1]} | tojson(indent=2) }}") == '{\n  "a": [\n    1\n  ]\n}'
