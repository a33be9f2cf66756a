"""The processes of a run: their devices, and how they exchange values."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from dlrm.utils.messages import print_error, printable

T = TypeVar("T")
POLL = 0.01  # seconds between two checks of a key
TIMEOUT = timedelta(minutes=30)  # of a collective: others wait while one evaluates or writes


@dataclass
class World:
    """The processes of a run, seen from one of them.

    A single process needs no process group: all collectives are the identity.

    Args:
        rank: rank of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    """The device of this process."""
    job: str | None = None
    """The job of torchrun and its command line, the same for all attempts; None without torchrun,
    and before :meth:`rendezvous`."""
    _before_leaving: list[Callable[[], Callable[[], object] | None]] = field(
        default_factory=list, repr=False
    )
    _store: dist.Store | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls) -> World:
        """The processes of torchrun; a single one without it."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @property
    def first(self) -> bool:
        """True for the process that prints, logs and writes."""
        return self.rank == 0

    @property
    def ring(self) -> list[int]:
        """All ranks, starting with this one."""
        return [(self.rank + step) % self.size for step in range(self.size)]

    def rendezvous(self) -> None:
        """Connect to the shared store, and wait for all processes; needs no device."""
        run_id = os.environ.get("TORCHELASTIC_RUN_ID")
        if self._store is not None or (self.size == 1 and run_id is None):
            return
        store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore("dlrm", store)

        if run_id == "none":  # there is no --rdzv-id; the store exists as long as the job
            run_id = store.compare_set("job", "", uuid4().hex).decode()
        self.job = run_id and shlex.join([run_id, *sys.argv[1:]])
        self._store = dist.PrefixStore(agree_on_attempt(store, self.rank, self.size), store)

    def join(self, device: torch.device) -> torch.device:
        """Join the process group, NCCL on GPUs, gloo on CPUs; returns the device."""
        self.device = device
        if self.size == 1:
            return device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.rendezvous()
        assert self._store is not None

        # If torch.compile imports this module later, it keeps a reference to the group, whose
        # threads may then abort the process at exit.
        import_module("torch.distributed.nn.functional")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
        )
        sys.excepthook = partial(_report_lost_peer, self, sys.excepthook)
        return device

    def before_leaving(self, act: Callable[[], object], *, keep: bool = False) -> None:
        """Call a method before the process group is destroyed, if its object still exists.

        Captured graphs with collectives must be deleted by then.

        Args:
            act: the method.
            keep: have the object exist until then, even if an error ends the work before.
        """
        self._before_leaving.append((lambda: act) if keep else WeakMethod(act))

    def leave(self) -> None:
        """Destroy the process group without waiting for the others."""
        for reference in self._before_leaving:
            if (act := reference()) is not None:
                act()
        self._before_leaving.clear()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def share(self, batch_size: int, *, even: bool = True) -> int:
        """Samples per process of a global batch.

        Args:
            batch_size: number of samples of the global batch.
            even: require equal shares; otherwise round up.

        Raises:
            ValueError: the shares are not equal.
        """
        share, rest = divmod(batch_size, self.size)
        if not even:
            return share + bool(rest)
        if rest:
            raise ValueError(
                f"--batch_size {batch_size} can't be shared evenly by {self.size} processes: use "
                f"{max(share, 1) * self.size} or {(max(share, 1) + 1) * self.size}"
            )
        return share

    def from_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the first process and return its result on every process."""
        if self.size == 1:
            return make()
        box: list[Any] = [make() if self.first else None]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def from_all(self, value: T) -> list[T]:
        """``value`` of every process, by rank, on every process."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def print_error_once(self, text: str) -> None:
        """Print an error that several processes may report: only the first one prints it.

        Each of them also passes it to torchrun, for the report at the end.
        """
        if self._is_first_to("print an error"):
            print_error(text)
        _tell_torchrun(printable(text))

    @contextmanager
    def print_once(self) -> Iterator[None]:
        """Print the output of the block once, not once per process.

        The first process to reach the end prints, as torchrun ends the others after an error.
        """
        if self.size == 1:
            yield
            return
        out, error = StringIO(), StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(error):
                yield
        finally:
            if self._is_first_to("print"):
                print(out.getvalue(), end="", flush=True)
                print(error.getvalue(), end="", file=sys.stderr, flush=True)
            _tell_torchrun(error.getvalue())

    def _is_first_to(self, act: str) -> bool:
        if self._store is not None:
            with suppress(dist.DistError):  # torchrun, which has the store, may have ended
                return self._store.add(act, 1) == 1
        return self.first

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def sizes(self, count: int, device: torch.device, *, equal: bool = False) -> list[int]:
        """``count`` of every rank; if they are ``equal``, nothing is exchanged."""
        if equal or self.size == 1:
            return [count] * self.size
        mine = torch.tensor([count], device=device)
        counts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(counts, mine)
        return torch.cat(counts).tolist()

    def gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
        """``tensor`` of every rank; ``sizes`` has the length of each along ``dim``."""
        if self.size == 1:
            return [tensor]

        longest, padded = max(sizes), tensor.contiguous()
        if min(sizes) < longest:
            shape = list(tensor.shape)
            shape[dim] = longest
            padded = tensor.new_zeros(shape)
            padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]

    def gather_ids(
        self, tables: Tensor, ids: Tensor, *, equal: bool = False
    ) -> tuple[Tensor, Tensor, slice | None]:
        """Tables and ids of the global batch, in its order, and the columns of this process.

        Args:
            tables, ids: ``[F, 1]`` and ``[F, B]``, or both ``[nnz]``, table by table, which have no
                columns.
            equal: all processes have the same number of ids.
        """
        sizes = self.sizes(ids.shape[-1], ids.device, equal=equal)
        if ids.dim() == 2:
            begin = sum(sizes[: self.rank])
            gathered = torch.cat(self.gather(ids, sizes, dim=1), 1)
            return tables, gathered, slice(begin, begin + ids.shape[1])
        both = torch.cat(self.gather(torch.stack([tables, ids.to(tables)], 1), sizes))
        both = both[both[:, 0].argsort(stable=True)]
        return both[:, 0], both[:, 1], None

    def in_order(self, columns: tuple[Tensor, ...], rows: int, share: int) -> tuple[Tensor, ...]:
        """Values of all rows of a split, on every rank, in the order of the rows.

        Args:
            columns: values for this rank's share of every batch of a ``BatchLoader``, such as
                logits and labels.
            rows: number of rows of the split.
            share: samples per rank of a batch.
        """
        if self.size == 1:
            return columns
        both = torch.stack(columns, 1)
        parts = self.gather(both, self.sizes(len(both), both.device))

        taken = [0] * self.size
        ordered = []
        for first in range(0, rows, share * self.size):
            each, extra = divmod(min(share * self.size, rows - first), self.size)
            for rank, part in enumerate(parts):
                count = each + (rank < extra)
                ordered.append(part[taken[rank] : taken[rank] + count])
                taken[rank] += count
        return tuple(torch.cat(ordered).t())


def agree_on_attempt(store: dist.Store, rank: int, size: int) -> str:
    """A text that all processes of this attempt share, and that no other attempt uses.

    torchrun's store still has the keys of earlier attempts, and ``TORCHELASTIC_RESTART_COUNT`` does
    not distinguish attempts: it stays the same when the number of nodes changes. So each process
    makes up a new key, under which the first process answers.
    """
    if rank:
        key = uuid4().hex
        store.set(f"hello/{rank}", key)
        while not store.check([f"welcome/{key}"]):
            time.sleep(POLL)
        attempt = store.get(f"welcome/{key}").decode()
        store.set(f"ready/{attempt}/{rank}", "")
        return attempt

    attempt, waiting = uuid4().hex, set(range(1, size))
    while waiting:
        for other in [other for other in waiting if store.check([f"hello/{other}"])]:
            store.set(f"welcome/{store.get(f'hello/{other}').decode()}", attempt)
        waiting -= {other for other in waiting if store.check([f"ready/{attempt}/{other}"])}
        time.sleep(POLL)
    return attempt


def _tell_torchrun(text: str) -> None:
    """Write an error of this process to the file that torchrun reads for its report."""
    if text and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        message = text.replace("error: ", "").strip()
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def _report_lost_peer(
    world: World,
    otherwise: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Report in one line that another process has ended, if a collective failed for that reason.

    Nothing is printed if that process has printed an error.
    """
    if issubclass(kind, RuntimeError) and "by peer" in str(error):
        world.print_error_once("error: another process has ended; see its error")
    else:
        otherwise(kind, error, trace)


def exchange(
    x: Tensor, give: Sequence[int], get: Sequence[int], comm_dtype: torch.dtype | None = None
) -> Tensor:
    """All-to-all: send a part of ``x`` to every rank, and receive one from each; differentiable.

    Args:
        x: ``[n]``, one part after the other.
        give: number of elements for each rank, n in total.
        get: number of elements from each rank.
        comm_dtype: type in which values and gradients are sent; None: the type of ``x``.

    Returns:
        ``[sum(get)]``, of that type.
    """
    return _Exchange.apply(x if comm_dtype is None else x.to(comm_dtype), list(give), list(get))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, give: list[int], get: list[int]) -> Tensor:
        ctx.give = give
        ctx.get = get
        return _all_to_all(x, give, get)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.get, ctx.give), None, None


def _all_to_all(x: Tensor, give: list[int], get: list[int]) -> Tensor:
    out = x.new_empty(sum(get))
    dist.all_to_all_single(out, x.contiguous(), get, give)
    return out
