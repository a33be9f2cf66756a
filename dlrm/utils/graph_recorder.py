"""Work on a GPU that is recorded once and replayed with one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dlrm.utils.streams import stream_of

Output = TypeVar("Output")


class GraphRecorder:
    """Records CUDA graphs in one memory pool: their replays never overlap.

    Args:
        device: of the work.
        purpose: of the stream on which it is recorded, see :func:`stream_of`.
    """

    def __init__(self, device: torch.device, purpose: str = "steps") -> None:
        self._stream = stream_of(device, purpose)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Output]) -> Output:
        """Run what will be recorded as it will be: on the stream of the captures."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = run()
        current.wait_stream(self._stream)
        return out

    def record(self, run: Callable[[], Output]) -> tuple[Callable[[], object], Output]:
        """Capture a function, which computes nothing.

        Returns:
            Its replay, and what it returned: tensors that a replay writes.

        Raises:
            Exception: of the function, or else of the capture. It can run without one afterwards.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        cause: Exception | None = None

        collects = gc.isenabled()
        gc.disable()  # pinned memory that garbage holds would be released, which ends a capture
        try:
            # Another thread may load batches meanwhile, with streams and memory of its own.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                try:
                    out = run()
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            torch.cuda.set_stream(current)
            self._abandon()
            raise (cause or error) from None
        finally:
            if collects:
                gc.enable()
            cause = None  # its frames hold the memory of the work, and one of them holds it
        return graph.replay, out

    def _abandon(self) -> None:
        """Undo what PyTorch leaves after a capture that failed to end."""
        index = self._stream.device_index
        with suppress(RuntimeError):  # from 2.12 on, the allocator knows that it is over
            torch._C._cuda_endAllocateToPool(index, self._pool)
        # The generator still counts for the graph, and would refuse to draw outside of it.
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())


class RecordedByShape(Generic[Output]):
    """A function of tensors, run as a CUDA graph for each of their shapes; on a CPU as it is.

    The first two calls with a shape run the function, which compiles its kernels; the second one
    also records it, on copies of the inputs.

    Args:
        run: the function; it must not wait for the GPU.
        device: of the tensors.
        purpose: of the stream on which it is recorded.
    """

    def __init__(self, run: Callable[..., Output], device: torch.device, purpose: str) -> None:
        self._run = run
        self._recorder = GraphRecorder(device, purpose) if device.type == "cuda" else None
        self._recorded: dict[Any, tuple[list[Tensor], Callable[[], object], Output] | None] = {}

    def __call__(self, *inputs: Tensor) -> Output:
        """Returns what the function returns; the next replay writes to the same memory."""
        if self._recorder is None:
            return self._run(*inputs)
        key = tuple((each.shape, each.dtype) for each in inputs)
        if key not in self._recorded:
            self._recorded[key] = None
            return self._run(*inputs)

        if (recorded := self._recorded[key]) is None:
            static = [each.clone() for each in inputs]
            now = self._run(*static)
            self._recorded[key] = static, *self._recorder.record(lambda: self._run(*static))
            return now
        static, replay, out = recorded
        for to, each in zip(static, inputs, strict=True):
            to.copy_(each)
        replay()
        return out
