"""What programs set before they import PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm.utils import startup

ROOT = Path(__file__).parents[2]
PREFIXES = ("OMP_", "GOMP_", "KMP_")


def set_by_startup(**given):
    """The variables of OpenMP in a program that has begun with the given ones."""
    code = "import os, sys; from dlrm.utils import startup; startup.begin(); "
    code += "assert not {'torch', 'numpy'} & sys.modules.keys(); print(dict(os.environ))"
    others = {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=others | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {k: v for k, v in eval(done.stdout).items() if k.startswith(PREFIXES)}


def test_a_program_without_streams_begins_with_others():
    """What is printed does not get into the first file that is opened, and prints nothing."""
    code = "import os, sys; from dlrm.utils import startup; startup.begin(); "
    code += "print('out'); print('error', file=sys.stderr); sys.exit(os.open(os.devnull, 0))"
    command = f'exec {sys.executable} -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(command, shell=True, cwd=ROOT).returncode == 3


@pytest.mark.parametrize("megabytes", [300, 700])  # PyTorch does not fit, and then pandas
def test_imports_without_memory_end_in_one_line(megabytes):
    command = f"ulimit -v {megabytes << 10}; exec {sys.executable} scripts/export.py --help"
    others = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=others, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"error: there is not enough memory: raise its limit (ulimit -v)\n"


def test_threads_that_wait_spin_briefly_unless_the_user_says():
    found = set_by_startup()
    assert found.pop("GOMP_SPINCOUNT", "0") in ("0", "20000")
    assert found == {"KMP_BLOCKTIME": "0"}
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert set_by_startup(**{name: "7"}) == {name: "7"}


@pytest.mark.parametrize(
    ("load", "machine", "spins"),
    [
        ("1/95", "x86_64", "20000"),
        ("2/95", "AMD64", "0"),
        ("none", "x86_64", "0"),
        (None, "x86_64", "0"),
        ("1/95", "arm64", None),  # other CPUs spin faster
    ],
    ids=["alone", "others", "odd", "unknown", "arm"],
)
def test_they_spin_longer_if_nothing_else_runs(load, machine, spins, monkeypatch, tmp_path):
    if load:
        (tmp_path / "loadavg").write_text(f"0.03 0.02 0.00 {load} 4711\n")
    monkeypatch.setattr(startup, "_LOAD", str(tmp_path / "loadavg"))
    monkeypatch.setattr(startup.platform, "machine", lambda: machine)
    monkeypatch.setattr(os, "environ", {})
    startup.bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(
    ("choose", "name", "default"),
    [
        (startup.set_compilers, "TRITON_CACHE_DIR", str(Path("home", ".triton", "cache"))),
        (startup.set_compilers, "TORCHINDUCTOR_COMPILE_THREADS", "1"),
        (startup.keep_memory, "MIMALLOC_PURGE_DELAY", "10000"),
    ],
)
def test_variables_are_set_unless_the_user_has(choose, name, default, monkeypatch):
    for given, found in (({}, default), ({name: "7"}, "7")):
        monkeypatch.setattr(os, "environ", {"TRITON_HOME": "home", **given})
        choose()
        assert os.environ[name] == found


@pytest.mark.parametrize(
    ("writable", "compiled", "unwanted", "prefix", "cached"),
    [
        (False, False, False, None, True),
        (True, False, False, None, False),
        (False, True, False, None, False),
        (True, False, True, None, True),
        (True, True, True, None, False),
        (False, False, True, "chosen", False),  # by the user
    ],
)
def test_bytecode_is_kept_for_the_user_where_it_is_not_elsewhere(
    writable, compiled, unwanted, prefix, cached, monkeypatch, tmp_path, capsys
):
    torch = tmp_path / "torch"
    (torch / "__pycache__" if compiled else torch).mkdir(parents=True)
    (torch / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "access", lambda *_: writable)
    monkeypatch.setattr(sys, "dont_write_bytecode", unwanted)
    monkeypatch.setattr(sys, "pycache_prefix", prefix)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    startup.keep_bytecode()
    assert sys.pycache_prefix == (str(tmp_path / "dlrm" / "bytecode") if cached else prefix)
    assert sys.dont_write_bytecode == (unwanted and not cached)
    assert ("PYTHONPYCACHEPREFIX" in capsys.readouterr().err) == cached


def test_programs_begin_before_they_import_pytorch():
    """PyTorch's threads read the environment when it is imported."""
    code = """
import os, runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print({k for k in os.environ if k.startswith(("GOMP_", "KMP_"))})
            sys.exit()
sys.meta_path.insert(0, Finder())
runpy.run_path("train.py", run_name="__main__")
"""
    others = {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=others, capture_output=True, text=True)
    assert "KMP_BLOCKTIME" in done.stdout, done.stderr


def test_pyarrow_can_do_without_pandas():
    code = "import sys; from dlrm.utils import startup; startup.without_pandas(); "
    code += "import pyarrow as pa; assert pa.array(['a']).to_pylist() == ['a']; "
    code += "assert 'pandas' not in sys.modules; import pandas; print(pandas.Series([1]).sum())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
