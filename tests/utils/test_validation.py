"""Values are checked against types, and every mistake is told with its place and its rule."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
from annotated_types import Ge

from dlrm.utils.validation import Closed, Flag, Number, Text, Texts, Whole, must, validate


@dataclass(frozen=True, kw_only=True)
class Part(Closed):
    size: Annotated[Whole, Ge(1)] = 1
    on: Flag = False


@dataclass(frozen=True, kw_only=True)
class Record(Closed):
    name: Annotated[Text, must("be short", lambda text: len(text) < 5)] = ""
    rate: Number = 0.0
    words: Texts = ()
    parts: dict[str, Part] = field(default_factory=dict)
    only: Part | None = None


def test_plain_values_become_a_record():
    found = validate(Record, {"name": 2024, "rate": 1, "words": "one", "parts": {"a": {"size": 2}}})
    assert found == Record(name="2024", rate=1.0, words=("one",), parts={"a": Part(size=2)})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "it must hold names and values, as name: value"),
        ({"name": "longer"}, "name is 'longer', it must be short"),
        ({"rate": "1"}, "rate is '1', it must be a number"),
        ({"rate": True}, "rate is True, it must be a number"),
        ({"words": [True]}, "words.0 is True, it must be text, in quotes"),
        ({"parts": {"a": {"size": 0}}}, "parts.a.size is 0, it must be at least 1"),
        ({"parts": {"a": {"size": 2.0}}}, "parts.a.size is 2.0, it must be a whole number"),
        ({"parts": {"a": {"sise": 0}}}, "parts.a: unknown option 'sise', did you mean 'size'?"),
        ({"only": {"onn": 0}}, "only: unknown option 'onn', did you mean 'on'?"),
        ({"rat": 1}, "unknown option 'rat', did you mean 'rate'?"),
        ({5: 1}, "the name 5 is not text: put it in quotes"),
        ({"name": "x" * 999}, f"name is '{'x' * 199}..., it must be short"),
    ],
)
def test_a_mistake_has_its_place_its_value_and_its_rule(value, told):
    with pytest.raises(ValueError, match=r"run\.yaml: ") as error:
        validate(Record, value, "run.yaml: ")
    assert str(error.value).startswith(f"run.yaml: {told}")


def test_all_mistakes_are_told_at_once_and_many_are_counted():
    parts = {str(i): {"size": 0, "on": 1} for i in range(50)}
    with pytest.raises(ValueError, match=r"; 97 more mistakes$") as error:
        validate(Record, {"parts": parts})
    assert "parts.0.size is 0, it must be at least 1; parts.0.on is 1, it must be" in str(
        error.value
    )
