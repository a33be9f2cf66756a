"""The README promises nothing that was not run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_tables_are_those_of_the_results():
    script = ROOT / "scripts" / "maintenance" / "readme_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, "run python scripts/maintenance/readme_tables.py"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./]+)\)", README))))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`?((?:scripts|configs)/\w+\.\w+)", README)))
)
def test_files_named_exist(path):
    assert (ROOT / path).exists()


def test_python_in_the_readme_runs():
    import torch

    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        names = {"trained": torch.nn.Embedding(5000, 64)}
        exec(block.replace("10_000_000", "10_000"), names)
        assert names["small"](torch.tensor([[1, 2]])).shape == (1, 64)
