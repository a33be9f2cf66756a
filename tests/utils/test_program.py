import subprocess
import sys

import pytest

from dlrm.utils.messages import did_you_mean
from dlrm.utils.program import Parser, exit_status, path_arg, positive_arg


def test_nearest_name_and_all_of_them():
    assert did_you_mean("rnk", ["rank", "q"]) == ", did you mean 'rank'? valid: q, rank"
    assert did_you_mean("zzz", ["rank", "q"]) == "; valid: q, rank"
    assert did_you_mean("zzz", map(str, range(5000))).endswith(", ... (5,000 in all)")


def test_an_unknown_option_is_named_before_a_missing_one(capsys):
    parser = Parser("What it does.")
    parser.add_argument("--output", required=True, help="where to")
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--outptu", "x"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown option --outptu, did you mean '--output'?")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "required: --output" in capsys.readouterr().err


def test_what_stands_behind_two_dashes_is_taken_as_it_is():
    parser = Parser("What it does.")
    parser.add_argument("--data")
    parser.add_argument("train", nargs="*")
    given = parser.parse_args(["--data", "d", "--", "--tt.rank", "3"])
    assert (given.data, given.train) == ("d", ["--tt.rank", "3"])


def test_help_gives_each_default_once_also_of_lists_and_without_a_text(capsys):
    parser = Parser("What it does.")
    parser.add_argument("--rows", type=int, default=3, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--batches", nargs="+", type=int, default=[2048, 65536])
    parser.add_argument("--ways", nargs="+", default=["fast", "not ahead"], help="of a step")
    parser.add_argument("--options", nargs="*", default=[], help="more options")
    parser.add_argument("--thresholds", nargs="+", default=[None], help="rows of tables")
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "how many (default: 3)" in text
    assert text.count("default: 0") == 1
    assert "(default: 2048 65536) --ways" in text
    assert "of a step (default: fast 'not ahead')" in text
    assert "more options --thresholds" in text
    assert text.endswith("rows of tables")


def test_an_empty_path_is_not_taken_for_the_current_directory(capsys):
    parser = Parser("What it does.")
    parser.add_argument("--output", type=path_arg)
    assert str(parser.parse_args(["--output= runs"]).output) == " runs"
    with pytest.raises(SystemExit):
        parser.parse_args(["--output="])
    assert capsys.readouterr().err == "error: argument --output: is empty, it must be a path\n"


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "ten"])
def test_a_positive_number_is_asked_for(text, capsys):
    parser = Parser("What it does.")
    parser.add_argument("--ratio", type=positive_arg)
    assert parser.parse_args(["--ratio", "2.5"]).ratio == 2.5
    with pytest.raises(SystemExit):
        parser.parse_args([f"--ratio={text}"])
    assert f"is '{text}', it must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ValueError("rows are 0"), 2, "error: rows are 0\n"),
        (FileNotFoundError(2, "No such file", "a"), 2, "error: [Errno 2] No such file: 'a'\n"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was written\n"),
        (None, 0, ""),
    ],
)
def test_a_program_ends_in_one_line(error, status, told, capsys):
    def work():
        if error:
            raise error

    assert exit_status(work, "interrupted; nothing was written") == status
    assert capsys.readouterr().err == told


def test_a_bug_is_not_taken_for_a_mistake_of_the_user():
    with pytest.raises(ZeroDivisionError):
        exit_status(lambda: 1 / 0)


def test_a_reader_that_has_gone_ends_a_program_quietly():
    code = "import sys; from dlrm.utils.program import exit_status; sys.exit(exit_status(main))"
    code = f"def main(): print('row ' * 100_000)\n{code}"
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    program.stdout.close()
    assert program.stderr.read() == ""
    assert program.wait() == 141
