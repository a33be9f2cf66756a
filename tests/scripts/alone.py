"""Runs Python as where this package is not installed: exports and the programs of examples/."""

import json
import subprocess
import sys

ALONE = "import sys; sys.modules['dlrm'] = None; "
PROGRAM = f"{ALONE}import runpy; sys.argv[:] = sys.argv[1:]; "
PROGRAM += "runpy.run_path(sys.argv[0], run_name='__main__')"
"""Runs the program that is its first argument."""
SCORE = """
import json, torch
from safetensors.torch import load_file

rows, *exports = sys.argv[1:]
sys.path.insert(0, exports[0])
from dlrm_reader import InputReader

for export in exports:
    program = torch.export.load(f"{export}/model.pt2")
    program.state_dict.update(load_file(f"{export}/weights.safetensors"))
    model, found = program.module(), []
    for arrays in InputReader.load(export).read([rows], batch_size=300):
        found += model(*map(torch.from_numpy, arrays)).tolist()
    print(json.dumps(found))
"""


def alone(code, *arguments, **options):
    """Run Python without this package; returns what it printed."""
    command = [sys.executable, "-c", ALONE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def export_scores(rows, *exports):
    """The scores of a file of raw rows by each export."""
    return [json.loads(line) for line in alone(SCORE, rows, *exports).splitlines()]
