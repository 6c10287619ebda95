#!/usr/bin/env python3
"""Writes tests/golden/chat.json: chat templates and what Jinja2 makes of them.

usage: make_chat_golden.py OUT      needs jinja2

The environment is that of Hugging Face transformers. A template with "refused" must be refused with
this text.
"""
import datetime
import json
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("say"), [], [], body).set_lineno(line)

    def say(self, caller):
        return caller()


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    env.globals["strftime_now"] = lambda f: datetime.datetime(2024, 7, 26).strftime(f)
    return env


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hi, «du»\n"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nHello!", "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": 1, "b": [True, None, "é\"\\\n"], "c": 1.5}}}]},
        {"role": "tool", "content": "{\"t\": 20}"}, {"role": "user", "content": "Bye"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": {}, "a": []}}}]

GOOD = [
    # White space around tags.
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}\nend\n\n",
    "a  {%- set x = 1 -%}  b {{- x -}} c\n{# comment #}\n d {%+ if x %} e {% endif +%}\nf\n",
    " {{ messages[0].content }}\n\n{%- for m in messages -%}\n{{ m['role'] }},\n{%- endfor -%}",
    # Loops.
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}:{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }} {{ loop.previtem.role if loop.previtem is defined }}{{ '>' ~ loop.nextitem.role if loop.nextitem is defined else '.' }}\n{% endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ m.role }} {% else %}none{% endfor %}|{% for m in [] %}x{% else %}none{% endfor %}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }};{% endfor %}",
    "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set x = m.role %}{% set ns.last = x %}{% endfor %}{{ ns.n }} {{ ns.last }} {{ x is defined }}",
    "{% for k, v in {'b': 1, 'a': [2]}.items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}{% for i in range(1, 8, 3) %}{{ i }}{% endfor %}",
    "{% for x in [[1, 2], [3, 4]] %}{% for a in x %}{{ loop.index0 }}{{ a }}{% endfor %}{{ loop.index }}{% endfor %}",
    # Expressions.
    "{{ 1 + 2 * 3 - 4 // 3 % 2 }} {{ 7 / 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 1 ~ 'a' ~ none ~ true }} {{ 1.0 }} {{ 0.5 if false else 2.50 }} {{ 'ab' * 3 }}",
    "{{ 1 < 2 <= 2 }} {{ 'a' in 'cat' }} {{ 'x' not in ['x'] }} {{ not 1 == 2 and (0 or 'y') }} {{ 'k' in {'k': 0} }} {{ [1, 2] == [1, 2] }} {{ 1 == 1.0 }} {{ 'b' > 'a' }}",
    "{{ messages[-1].content }} {{ messages[1:3] | length }} {{ 'abcdef'[1:-1] }} {{ 'abcdef'[::-1] }} {{ 'aöü'[1] }} {{ [1, 2, 3, 4][::2] }} {{ messages[99] is defined }} {{ messages[::-1][0].role }}",
    "{{ nothing }}|{{ nothing is defined }}|{{ messages[0].x is undefined }}|{{ nothing | default('d') }}|{{ '' | default('e', true) }}|{{ messages[0].x or 'f' }}|{{ 'g' if messages[0].x }}",
    "{{ {'a': [1, 'it''s', \"it's\", none, true]} }} {{ (1, 2) | list }} {{ [] }} {{ {} }}".replace("'it''s', ", ""),
    "{{ \"tab\\t nl\\n q\\\" u\\u00e9 x\\x41 bad\\q\" }}",
    "{% set a, b = 1, 'two' %}{{ a }}{{ b }}{% set text %} captured {{ a }} {% endset %}[{{ text }}]",
    # Macros.
    "{% macro show(m, end='!') %}<{{ m.role }}>{{ caller_free | default('-') }}{{ end }}{% endmacro %}{{ show(messages[0]) }}{{ show(messages[1], end='?') }}{{ show(m=messages[3], end='.') | upper }}",
    "{% macro down(n) %}{{ n }}{% if n > 0 %}{{ down(n - 1) }}{% endif %}{% endmacro %}{{ down(5) }}",
    # Filters and tests.
    "{{ messages[1].content | trim }}|{{ 'a-b' | replace('-', '+') }}|{{ ' x ' | trim | length }}|{{ 'hello world' | title }} {{ 'hELLO' | capitalize }} {{ 'x' | upper }}",
    "{{ messages | map(attribute='role') | join(', ') }}|{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|{{ messages | rejectattr('tool_calls', 'defined') | map(attribute='role') | list }}|{{ [3, 1, 2] | sort | join }}|{{ ['b', 'a', 'b'] | unique | list }}|{{ [1, 2, 3] | last }}{{ [1, 2] | first }}|{{ [0, 1, 2] | select | list }}|{{ ['1', 'x'] | map('int') | list }}",
    "{{ tools | tojson }}\n{{ messages[2].tool_calls[0].function.arguments | tojson }}\n{{ tools[0] | tojson(indent=2) }}\n{{ 'é\\n' | tojson }} {{ [] | tojson }} {{ {} | tojson(indent=4) }}",
    "{{ messages[1:3] | tojson(ensure_ascii=true) }} {{ '\U0001f600~\x7f\x1f' | tojson(true) }}{{ '\x7f' | tojson }}{{ tools | tojson(separators=(',', ':')) }}{{ tools | tojson(indent=1, separators=(', ', '=')) }}",
    "{{ messages.0.role }}{{ messages.2.tool_calls.0.function.arguments.b.2 }}{{ messages.9 is defined }}{{ messages.4.content.0 }}",
    "{{ 'a\\nb\\n\\nc' | indent(2) }}|{{ 'a\\nb' | indent(2, true) }}|{{ 3 is odd }}{{ 4 is even }}{{ 'x' is string }}{{ {} is mapping }}{{ [] is iterable }}{{ 1 is number }}{{ none is none }}{{ 1.5 is float }}{{ true is boolean }}{{ 9 is divisibleby 3 }}{{ 'a' is in ['a'] }}{{ 2 is not none }}{{ messages is sequence }}{{ tools is not string }}",
    "{{ '5' | int + 1 }} {{ 'x' | int }} {{ -3 | abs }} {{ 2.9 | int }} {{ [1, 5, 3] | max }} {{ 'ab' | list }} {{ 'ab' | reverse }} {{ 3 | string + '3' }}",
    # Methods.
    "{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}|{{ '  a b  c '.split() }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'x/y/z'.rsplit('/', 1) }}|{{ '--x--'.strip('-') }}|{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith(('x', 'c')) }}|{{ 'aXa'.replace('a', 'b', 1) }}|{{ 'abc'.find('c') }}{{ 'aa'.count('a') }}|{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.get('z') }}|{{ 'A'.lower() }}|{{ 'a\\nb'.splitlines() }}|{{ ', '.join(['x', 'y']) }}",
    "{{ strftime_now('%d %b %Y') }} {{ strftime_now is defined }} {{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{% generation %}said{% endgeneration %}",
    "{% set gears = {0: 'a', 512: 'b'} %}{% for k, v in gears | dictsort %}{% if 100 <= k %}{{ v }}{% endif %}{% endfor %}{{ gears[512] }}",
]
REFUSED = [
    ("{{ messages | groupby('role') }}", "line 1: not supported: filter 'groupby'"),
    ("\n\n{{ cycler('a') }}", "line 3: not supported: function 'cycler'"),
    ("{{ 1 is callable }}", "not supported: test 'callable'"),
    ("{{ 'a'.encode('x') }}", "not supported: method 'encode' of a string"),
    ("{{ messages.append(1) }}", "not supported: method 'append' of an array"),
    ("{% include 'x' %}", "line 1: not supported: statement 'include'"),
    ("{% call x() %}{% endcall %}", "not supported: statement 'call'"),
    ("a\n{% if x %}", "comes before 'elif'"),
    ("{{ 'ä' | upper }}", "beyond ASCII"),
    ("{{ }}", "an expression is missing"),
    ("{{ 'x }}", "a string without end"),
    ("{{ 1 +* 2 }}", "an expression is missing"),
    ("{% endif %}", "not supported: statement 'endif'"),
    ("{{ raise_exception('only ' ~ messages | length) }}", "refuses the conversation: only 5"),
    ("{{ nothing.member }}", "an undefined value has no member 'member'"),
    ("{{ 1 / 0 }}", "not a finite number"),
    ("{{ 1 // 0 }}", "division by zero"),
    ("{{ 'a' + 1 }}", "cannot be applied to a string and"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "more than 60 deep"),
    ("{% for i in range(9999999) %}{% for j in range(9999999) %}x{% endfor %}{% endfor %}", "too many steps"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "too much text"),
    ("{% set ns = namespace() %}{% set ns.me = [ns] %}", "a namespace in a namespace"),
    ("{{ " + "(" * 200 + "1" + ")" * 200 + " }}", "nested"),
    ("{{ " + "not " * 200 + "1 }}", "nested"),
    ("{% if 1 %}" * 200 + "{% endif %}" * 200, "nested"),
    ("{% set a = [] %}" + "{% set a = [a] %}" * 200, "nested more than 100 deep"),
    ("{{ 9223372036854775807 + 1 }}", "a number of more than 18 digits"),
    ("{{ 999999999999999999 * 99 }}", "beyond 64 bits"),
]


def main():
    cases = []
    env = environment()
    for text in GOOD:
        expected = env.from_string(text).render(
            messages=CHAT, tools=TOOLS, documents=None, add_generation_prompt=False,
            bos_token="<s>", eos_token="</s>")
        cases.append({"template": text, "expected": expected})
    cases += [{"template": text, "refused": reason} for text, reason in REFUSED]
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        json.dump({"messages": CHAT, "tools": TOOLS, "cases": cases}, f, ensure_ascii=False, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
