"""The text of ``dlrm train --help``, printed without PyTorch, which takes seconds to import.

The options of the embedding kinds are the arguments of their classes, which need PyTorch. So their
texts are stored in ``options.json``; ``python -m dlrm.config.help`` writes it again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("options.json")


def print_help(argv: Sequence[str]) -> bool:
    """Print the help if a command line asks for it; returns whether it does."""
    asked = bool({"-h", "--help"} & set(argv))
    if asked:
        print(help_text(json.loads(STORED.read_text())), end="")
    return asked


def help_text(texts: Mapping[str, str]) -> str:
    """The text of ``--help``.

    Args:
        texts: of each option, by its full name.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--config FILE] [--emb KIND] [--OPTION VALUE ...]",
        description="Train a DLRM whose embedding tables are stored as --emb says. Options of a "
        "kind may differ by table: --tt.rank '{C3: 64, default: 16}'.",
        add_help=False,
    )

    # What acts on all options.
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="Print this text and stop.")
    text = "YAML file with options, or the name of one that comes with dlrm, such as "
    text += "criteo_kaggle. Options on the command line override it. (default: none)"
    add("--config", metavar="FILE", help=text)
    text = "Print all options as YAML, which --config reads, and stop. (default: false)"
    add("--print_config", action="store_true", help=text)

    # Each group of options, such as --optim.*, has its own heading.
    groups: dict[str, Any] = {"": parser}
    for name, text in texts.items():
        group, _, leaf = name.rpartition(".")
        if group not in groups:
            groups[group] = parser.add_argument_group(f"--{group}.*")
        groups[group].add_argument(f"--{name}", metavar=leaf.upper(), help=text.replace("%", "%%"))
    return parser.format_help()


if __name__ == "__main__":
    from dlrm.config.options import option_schema, option_texts
    from dlrm.embeddings import available

    texts = option_texts(option_schema(available()))
    STORED.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
