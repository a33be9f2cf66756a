"""Files that are cheap to write and dear to read are refused at once."""

import json
import resource
import time

import pytest
import yaml

from dlrm.utils import documents
from dlrm.utils.documents import parse_json, parse_yaml, read_json, read_json_lines, read_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
DEEP = "".join(f"a{i}: &a{i} {'[' * 20}{f'*a{i - 1}' if i else 1}{']' * 20}\n" for i in range(9))

YAML = {
    "a bomb of aliases": (BOMB, "it has more than 10,000 values, aliases resolved"),
    "a bomb of text": (f"a: &a {'x' * 10**5}\nb: [{'*a,' * 900}]", "more than 10,000 values"),
    "deep lists": ("[" * 500 + "]" * 500, "it is nested more than 32 deep"),
    "deep mappings": ("{a: " * 500, "it is nested more than 32 deep"),
    "deep blocks": ("- " * 500, "it is nested more than 32 deep"),
    "deep by aliases": (DEEP, "it is nested more than 32 deep"),
    "itself": ("a: &a {b: *a}", "an alias refers to a value that contains it"),
    "many bytes": ("x" * (1 << 20) + "xx", "it has more than 1,048,576 bytes"),
    "a long number": ("1" + "0" * 400, "it holds a number of 401 characters, more than 64"),
    "a long sum": ("1" + ":59" * 300 + ".0", "it holds a number of 903 characters"),
    "a long tagged number": (f"!!int '{'1' * 400}'", "it holds a number of 400 characters"),
    "half a character": ('"\\ud800"', "invalid Unicode|not valid Unicode"),
    "no character": ('"\\UDDDDDDDD"', "invalid Unicode|too large"),
    "half a character as it is": ("\ud800", "not valid Unicode|unacceptable character"),
    "a name twice": ("a: 1\nb: 2\na: 3", "it names 'a' twice"),
    "a name as number and text": ("1: a\n'1': b", "it names '1' twice"),
    "an empty number": ("!!int ''", "string index out of range"),
    "no truth": ("!!bool x", "'x'"),
    "no time": ("!!timestamp x", "has no attribute"),
    "an object": ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "two documents": ("--- 1\n--- 2", "expected a single document"),
    "a control character": ("\x00", "unacceptable character"),
}
JSON = {
    "deep": ("[" * 500 + "]" * 500, "it is nested more than 32 deep"),
    "deeper than Python": ('{"a":' * 10**5, "it is nested more than 32 deep"),
    "many values": ("[" + "1," * 500_000 + "1]", "it has more than 400,000 values"),
    "many bytes": ('"' + "x" * (1 << 23) + '"', "it has more than 8,388,608 bytes"),
    "a long number": ("1" + "0" * 400, "it holds a number of 401 digits, more than 64"),
    "half a character": ('{"a": "\\ud800"}', "it is not valid Unicode"),
    "half a character as a name": ('{"\\uDFFF": 1}', "it is not valid Unicode"),
    "a name twice": ('{"a": 1, "a": 1}', "it names 'a' twice"),
    "nothing": ("", "Expecting value"),
}


@pytest.fixture
def cheaply():
    """Fails if a test takes more than two seconds of CPU time or 200 MB."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.usefixtures("cheaply")
@pytest.mark.parametrize("kind", YAML)
@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
def test_yaml_beyond_a_limit_is_refused_at_once(tmp_path, monkeypatch, kind, loader):
    monkeypatch.setattr(documents, "_LOADER", getattr(yaml, loader, yaml.SafeLoader))
    text, reason = YAML[kind]
    with pytest.raises(ValueError, match=reason) as refused:
        parse_yaml(text)
    assert "\n" not in str(refused.value)
    path = tmp_path / "run.yaml"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(ValueError, match=r"run\.yaml can't be read: "):
        read_yaml(path)


@pytest.mark.usefixtures("cheaply")
@pytest.mark.parametrize("kind", JSON)
def test_json_beyond_a_limit_is_refused_at_once(tmp_path, kind):
    text, reason = JSON[kind]
    with pytest.raises(ValueError, match=reason) as refused:
        parse_json(text)
    assert "\n" not in str(refused.value)
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ValueError, match=r"meta\.json can't be read: "):
        read_json(tmp_path / "meta.json")


def test_what_is_within_the_limits_is_read():
    assert parse_yaml("a: &a {x: 1, y: [2, ~]}\nb: {<<: *a, x: 3}\nc: *a") == {
        "a": {"x": 1, "y": [2, None]},
        "b": {"x": 3, "y": [2, None]},
        "c": {"x": 1, "y": [2, None]},
    }
    assert parse_yaml("") is None
    values = {"text": "\U0001f600 é", "number": 10**63, "deep": {"a": [[{}]]}, "none": None}
    assert parse_yaml(yaml.safe_dump(values)) == values
    assert parse_json(json.dumps(values)) == values
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"
    tables = {f"C{i}": {"rank": i, "q": [2, 2, 4]} for i in range(1000)}
    assert parse_yaml(yaml.safe_dump(tables)) == tables
    assert parse_json(json.dumps(tables)) == tables


def test_lines_are_read_one_at_a_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert list(read_json_lines(path)) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n' + "[" * 500 + "]" * 500 + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON: it is nested more"):
        list(read_json_lines(path))
    path.write_bytes(b"1" * (documents.MAX_JSON_BYTES + 5))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is not JSON: it has more than"):
        list(read_json_lines(path))
