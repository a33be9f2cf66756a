"""The house rules that a reader can't see at a glance: who imports whom."""

import ast
import json
import re
from graphlib import TopologicalSorter
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name

from dlrm.config.help import STORED
from dlrm.config.options import option_schema, option_texts
from dlrm.embeddings import available
from dlrm.export.reader import CARRIED

ROOT = Path(__file__).parent.parent
FILES = {
    path.relative_to(ROOT): (path.read_text(), ast.parse(path.read_text()))
    for path in sorted((ROOT / "dlrm").rglob("*.py"))
}
"""The modules with their source and its tree."""

BELOW = {
    "utils": (),
    "kernels": ("utils",),
    "data": ("utils",),
    "embeddings": ("utils", "kernels"),
    "optim": ("utils", "kernels"),
    "distributed": ("utils", "kernels", "data", "embeddings", "optim"),
}
BELOW["sparse_arch"] = (*BELOW["distributed"], "distributed")
BELOW["model"] = (*BELOW["sparse_arch"], "sparse_arch")
BELOW["config"] = BELOW["training"] = (*BELOW["model"], "model")
BELOW["export"] = (*BELOW["training"], "training")
BELOW["commands"] = (*BELOW["export"], "export", "config")
BELOW["__main__"] = ("commands",)
"""What each room of ``dlrm`` may import, next to itself: imports go one way."""

KERNELS_BELOW = {
    "": (),
    "lists": ("",),
    "update": ("",),
    "multi_copy": ("",),
    "peer_sum": ("", "lookup"),
    "interaction": ("",),
    "loss": ("",),
    "mlp": ("", "multi_copy"),
    "cross": ("", "interaction", "mlp", "multi_copy"),
    "lookup": ("", "update"),
    "tt": ("", "update"),
    "dynamic": ("", "lists", "update", "lookup"),
    "offload": ("", "lists", "update", "lookup", "tt"),
}
"""The same for the rooms of ``dlrm.kernels``; "" is the package itself."""

ARGUMENTS = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)
REFERENCE = re.compile(
    r":(func|class|meth|mod|data|attr):`~?([\w.]+)`|``(dlrm(?:\.\w+)+)(?:\(\))?``"
)
PROJECT_FILE = re.compile(r"\b(?:scripts|tests|docs|notebooks|configs)/[\w/]+\.\w+")


def imports(path):
    for node in ast.walk(FILES[path][1]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:  # relative to the package
            package = module_name(path).split(".")
            package = package if path.stem == "__init__" else package[:-1]
            parents = package[: len(package) - node.level + 1]
            yield ".".join([*parents, *filter(None, [node.module])])
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def module_name(path):
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def docstrings(node, owner=None):
    """Every string that stands alone, with the name of the class around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(getattr(child.value, "value", None), str):
            yield owner, child.value.value
        yield from docstrings(child, child.name if isinstance(child, ast.ClassDef) else owner)


def resolves(name, *scopes):
    """Whether a name is an attribute of one of the scopes, or an importable path."""
    for scope in scopes:
        try:
            attrgetter(name)(scope)
            return True
        except AttributeError:
            pass
    try:
        resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return "." in name


def room_of(module, package="dlrm"):
    """The part of a module's name below a package; None outside of it."""
    if module == package:
        return ""
    return (
        module.removeprefix(f"{package}.").partition(".")[0]
        if module.startswith(f"{package}.")
        else None
    )


def test_imports_go_one_way():
    for path in FILES:
        name, found = module_name(path), set(imports(path))
        outside = {module.partition(".")[0] for module in found} & {"train", "scripts", "tests"}
        assert not outside, path
        if room := room_of(name):
            rooms = {other for module in found if (other := room_of(module))}
            assert rooms <= {room, *BELOW[room]}, path
            triton = {module for module in found if module.startswith("triton")}
            assert name == "dlrm.kernels" or triton <= {"triton.testing"}, path
        if room == "kernels":
            package = "dlrm.kernels"
            own = room_of(name, package) or ""
            rooms = {room_of(module, package) for module in found if module.startswith(package)}
            assert rooms <= {own, *KERNELS_BELOW[own]}, path
        if name == "dlrm.config.schema":
            assert {room_of(module) for module in found} <= {None, "utils"}


def test_public_names_have_docstrings():
    for path, (_, tree) in FILES.items():
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                jit = any("jit" in ast.unparse(d) for d in node.decorator_list)
                assert jit or ast.get_docstring(node), (path, node.name)


def test_docstrings_refer_to_what_there_is():
    missing = []
    for path, (source, tree) in FILES.items():
        module = import_module(module_name(path))
        files = PROJECT_FILE.findall(source)
        missing += [(path, file) for file in files if not (ROOT / file).exists()]
        for cls, text in docstrings(tree):
            scopes = [module] if cls is None else [getattr(module, cls), module]
            for role, name, dotted in REFERENCE.findall(text):
                found = resolves(name or dotted, *scopes)
                if role == "attr":  # of an instance, or a field without a default
                    owner, _, field = name.rpartition(".")
                    found = found or f"self.{field}" in source or (owner and resolves(owner))
                if not found:
                    missing.append((path, name or dotted))
    assert not missing


def test_documented_arguments_are_parameters():
    for path, (_, tree) in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                function = next(
                    (n for n in node.body if getattr(n, "name", "") == "__init__"), None
                )
            else:
                function = node if isinstance(node, ast.FunctionDef) else None
            if function is not None:
                text = (ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\n")[0]
                documented = {n for names in ARGUMENTS.findall(text) for n in names.split(", ")}
                parameters = {
                    each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)
                }
                assert documented <= parameters, (path, node.name)


def test_the_rows_of_an_export_are_prepared_without_the_rest():
    """What an export carries is copied as it is: it imports by relative names, and no PyTorch."""
    found = [path for pattern in CARRIED for path in (ROOT / "dlrm").glob(pattern)]
    carried = {path.relative_to(ROOT) for path in found}
    for path in sorted(carried):
        source, _ = FILES[path]
        assert not re.search(r"^\s*(from dlrm\b|import (dlrm|torch)\b|from torch\b)", source, re.M)
        inside = {name for name in imports(path) if name.startswith("dlrm")}
        assert inside <= {module_name(file) for file in carried}


def test_no_module_of_the_preparation_imports_itself_through_others():
    room = [path for path in FILES if path.parent.name == "prepare"]
    TopologicalSorter({module_name(path): set(imports(path)) for path in room}).prepare()


def test_the_program_is_short_enough_to_be_read_in_one_go():
    lines = (ROOT / "dlrm" / "commands" / "train.py").read_text().splitlines()
    assert sum(1 for line in lines if line.strip()) < 300


def test_the_stored_help_is_that_of_the_options():
    """It goes stale with an option's name, type, default or help: python -m dlrm.config.help."""
    assert json.loads(STORED.read_text()) == option_texts(option_schema(available()))


UNPICKLES = re.compile(
    r"\b(pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal|weights_only|allow_pickle|read_pickle)\b"
    r"|torch\.(load|save|hub)\b|\bFileSystemReader\b|\bFileSystemWriter\b"
)


def test_nothing_unpickles_a_file():
    """A file that a user is given may be made to run a program when it is unpickled."""
    for path in [*FILES, *sorted((ROOT / "scripts").rglob("*.py")), "train.py"]:
        tree = ast.parse((ROOT / path).read_text())
        for owner in ast.walk(tree):  # docstrings and messages may speak of it
            if isinstance(owner, ast.Constant) and " " in str(owner.value):
                owner.value = ""
            if isinstance(getattr(owner, "body", None), list) and owner.body:
                first = owner.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    owner.body[0] = ast.Pass()
        assert not UNPICKLES.search(ast.unparse(tree)), path
