import pytest

from dlrm.utils.messages import print_error, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a price, é 価格 😀 'quoted' \\n", "a price, é 価格 😀 'quoted' \\n"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("one\nerror: two\r\t", "one\\nerror: two\\r\\t"),
        ("\ud800 \u202eabc\u2028\xa0\x85", "\\ud800 \\u202eabc\\u2028\\xa0\\x85"),
    ],
)
def test_what_is_printed_is_one_line_without_terminal_escapes(text, shown, capsys):
    assert printable(text) == shown
    print_error(text)
    assert capsys.readouterr().err == f"{shown}\n"
