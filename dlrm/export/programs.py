"""A model as programs: for PyTorch, compiled ahead of time for C++, and for ONNX."""

from __future__ import annotations

import importlib.util
import io
import logging
import shlex
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch._inductor import aoti_compile_and_package
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.export import Dim, ExportedProgram
from torch.export.passes import move_to_device_pass

from dlrm.export.inference import InferenceModel

DEVICES = ("cpu", "cuda")
CPP_LIBRARY = "libstdc++.so.6"
ONNX_PACKAGES = ("onnx", "onnxscript")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of PyTorch about itself."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of operators of packages that are not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def trace(model: InferenceModel, num_dense: int) -> ExportedProgram:
    """The model as a program of ATen operators with a dynamic batch.

    Args:
        model: on the CPU.
        num_dense: number of dense features N.
    """
    # Example inputs. Sizes of 0 and 1 would become constants, and equal sizes stay equal.
    batch = 4
    singles = model.multi_hot.count(False)
    inputs = [torch.zeros(num_dense, batch), torch.zeros(singles, batch, dtype=torch.int64)]
    rows = Dim("batch")
    shapes: list[Any] = [{1: rows}, {1: rows}]
    bags: list[dict[int, Any]] = []
    for index in range(model.multi_hot.count(True)):
        nnz = batch + 2 + index
        offsets = torch.tensor([0, 1, 2, 3, nnz])
        inputs += [torch.zeros(nnz, dtype=torch.int64), offsets]
        bags += [{0: Dim(f"nnz_{index}")}, {0: rows + 1}]

    dynamic = (*shapes, tuple(bags)) if bags else tuple(shapes)
    program = torch.export.export(model, tuple(inputs), dynamic_shapes=dynamic)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # it has paths of this machine
    return program


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as a safetensors file.

    Raises:
        OSError: it can't be written.
    """
    try:
        save_file(dict(weights), path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} can't be written: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes it private to its owner


def save_program(program: ExportedProgram, path: Path) -> None:
    """Write a program without its weights, which ``program.state_dict`` takes when it is loaded.

    Placeholders without memory take their place. They are NaN, so a score without weights is NaN.

    Raises:
        OSError: it can't be written.
    """
    content = io.BytesIO()  # on a full disk, PyTorch's own writer aborts the process
    weights = dict(program.state_dict)
    program.state_dict.update({name: _placeholder(value) for name, value in weights.items()})
    try:
        with _quiet():
            torch.export.save(program, content)
    finally:
        program.state_dict.update(weights)
    path.write_bytes(content.getbuffer())


def _placeholder(value: Tensor) -> Tensor:
    if not value.numel():
        return value  # such as a layer of no numbers; PyTorch can't write an expanded empty tensor
    fill = float("nan") if value.is_floating_point() else 0
    return torch.full((), fill, dtype=value.dtype).expand(value.shape)


def has_compiler() -> bool:
    """True if there is a C++ compiler, which :func:`compile_program` needs."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def compile_program(program: ExportedProgram, path: Path, device: str) -> None:
    """Compile a program ahead of time with AOTInductor, again without its weights.

    The code is for processors, or GPUs, like those of this machine.

    Raises:
        ValueError: there is no C++ compiler, or no such device.
    """
    if not has_compiler():
        raise ValueError(
            "compiling needs a C++ compiler, and there is none: install g++, or give --compile "
            "without a name"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--compile cuda needs a GPU, and there is none: leave it out")

    configs = {
        "aot_inductor.custom_op_libs": _cpp_library(),
        "aot_inductor.package_constants_in_so": False,
        "always_keep_tensor_constants": True,
        # Precompiled headers save 3 core-seconds each time, but take 15 the first time.
        "aot_inductor.precompile_headers": False,
    }
    if device == "cuda":
        # Otherwise kernels are tried with random ids, which are outside of the tables.
        configs["triton.autotune_at_compile_time"] = False
    with _quiet(), _moved(program, device):
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)


def _cpp_library() -> list[str]:
    """The C++ library for the linker, so that a program shares the one that PyTorch has loaded.

    Some compilers would link a static one. With two of them in a process, a program crashes when it
    is loaded.
    """
    command = [*shlex.split(get_cpp_compiler()), f"-print-file-name={CPP_LIBRARY}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return [f":{CPP_LIBRARY}"] if Path(found).is_file() else []


@contextmanager
def _moved(program: ExportedProgram, device: str) -> Iterator[None]:
    """Move the program to a device in place, and afterwards back to the CPU."""
    if device == "cpu":
        yield
        return
    try:
        # With its number, as compiled programs check the exact device of every tensor.
        move_to_device_pass(program, f"cuda:{torch.cuda.current_device()}")
        yield
    finally:
        move_to_device_pass(program, "cpu")


def save_onnx(program: ExportedProgram, path: Path) -> None:
    """Write a program as ONNX, with its weights in a file next to it.

    Raises:
        ValueError: a package is missing, or ONNX lacks an operator.
    """
    if missing := [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"--onnx needs {', '.join(missing)}: pip install {' '.join(ONNX_PACKAGES)}, or leave "
            "it out"
        )
    try:
        with _quiet():
            written = torch.onnx.export(program, dynamo=True, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(f"the model can't be written as ONNX: {_first_cause(error)}") from None
    assert written is not None
    written.save(path, external_data=True)


def _first_cause(error: BaseException) -> str:
    """The first error of a chain, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{' '.join(str(error).split()):.300}"
