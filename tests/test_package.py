"""The package as users install it: a wheel, built from the source distribution."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dlrm

ROOT = Path(__file__).parents[1]
SHIPPED = ("dlrm", "configs", "examples", "pyproject.toml", "setup.py", "README.md", "LICENSE")
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def call(*command, cwd, **environment):
    """What a program prints."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        list(map(str, command)), cwd=cwd, env=others | environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A directory with the package as pip installs it; no network is needed."""
    work = tmp_path_factory.mktemp("package")
    source = work / "source"
    source.mkdir()
    for name in SHIPPED:
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, source / name)

    call(sys.executable, "-c", SDIST, work, cwd=source)
    (sdist,) = work.glob(f"dlrm-{dlrm.__version__}.tar.gz")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    call(*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", work, sdist, cwd=work)
    (wheel,) = work.glob(f"dlrm-{dlrm.__version__}-*.whl")
    call(*pip, "install", *alone, "--target", work / "site", wheel, cwd=work)
    return work / "site"


@pytest.mark.slow
def test_an_installed_package_has_a_command_that_works_in_any_directory(installed, tmp_path):
    def run(*arguments):
        command = [sys.executable, installed / "bin" / "dlrm", *arguments]
        return call(*command, cwd=tmp_path, PYTHONPATH=str(installed))

    where = "import dlrm; print(dlrm.__file__)"
    found = call(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(found.strip()) == installed / "dlrm" / "__init__.py"
    assert (installed / "dlrm" / "py.typed").exists()
    assert run("--version") == f"dlrm {dlrm.__version__}\n"
    for config in (ROOT / "configs").glob("*.yaml"):
        assert (installed / "dlrm" / "configs" / config.name).read_text() == config.read_text()

    (tmp_path / "clicks.csv").write_text("user,label\n" + "u1,0\nu2,1\n" * 20)
    run("prepare", "clicks.csv", "--output", "clicks")
    assert (tmp_path / "clicks" / "meta.json").exists()
    for option in ([], ["--criteo"]):
        assert run("prepare", *option, "--help").startswith("usage: dlrm prepare")
    run("train", "--config", "demo", "--emb", "qr", "--max_steps", "2", "--name", "mine")
    assert '"auc"' in run("evaluate", "runs/mine", "data/demo")
    for command in ("predict", "compare", "export", "serve"):
        assert run(command, "--help").startswith(f"usage: dlrm {command}")
