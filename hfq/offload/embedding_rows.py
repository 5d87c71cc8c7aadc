"""Copies of single embedding rows: one row per token, not the table."""

from __future__ import annotations

import inspect
import types
from typing import NoReturn

import torch
from torch import nn

from hfq.checkpoint.direct_io import DirectFiles
from hfq.errors import CheckpointError, SetupError
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.modules.flat_buffer import FlatBuffer
from hfq.modules.offloaded_parameter import no_copy
from hfq.offload.copy_stream import CopyStream
from hfq.offload.guards import in_unit
from hfq.offload.reader_threads import Pool, Ticket
from hfq.offload.stored_layers import BroughtLayer
from hfq.offload.unit import OffloadUnit, UnquantizedParameter
from hfq.tensor_spec import ByteRange, Segment

__all__ = ["EmbeddingTable", "can_read_rows", "is_table", "read_rows_on_demand"]

_ROWS_PER_JOB = 64


class EmbeddingTable:
    """A table [rows, size] in a file, or in pinned memory.

    Rows are cast to the parameter's dtype when they are looked up.

    Args:
        name: The module's name in the model, for messages.
        weight: The parameter of the table and its stored tensor.
        copy_stream: Copies rows to the execution device.
        files: Files for reads without read-ahead, which would read the whole table.
        pool: Threads that share the reads of many rows.
        stored: The bytes of the table in memory; None if it is only in the file.
    """

    def __init__(
        self,
        name: str,
        weight: UnquantizedParameter,
        copy_stream: CopyStream,
        files: DirectFiles,
        pool: Pool,
        stored: torch.Tensor | None = None,
    ) -> None:
        self.name = name
        self.info = weight.info
        self._weight = weight
        self._copy_stream = copy_stream
        self._files, self._pool = files, pool
        self._stored = None if stored is None else self._as_rows(stored)
        self._row_nbytes = weight.info.nbytes // max(weight.info.shape[0], 1)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(f"{self.name}, whose rows are read from disk")

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these tokens: [*tokens.shape, size]. Each row is read once.

        The rows are copied to the execution device from pinned memory.

        Raises:
            SetupError: A token is out of range.
            CheckpointError: The file was truncated or cannot be read.
        """
        wanted, places = tokens.reshape(-1).cpu().unique(return_inverse=True)
        numbers = wanted.tolist()
        if numbers and not 0 <= numbers[0] <= numbers[-1] < self.info.shape[0]:
            raise SetupError(
                f"{self.name} received a token outside of its table.",
                expected=f"0 to {self.info.shape[0] - 1}",
                found=f"{numbers[0]} to {numbers[-1]}",
                fix="Use the tokenizer of this checkpoint.",
            )
        try:
            rows = self._read(numbers) if self._stored is None else self._stored
        except CheckpointError as error:
            raise in_unit(error, self.name) from error
        memory = self._copy_stream.host_buffer(len(places) * self._row_nbytes)
        looked_up = self._as_rows(memory)
        looked_up.copy_(rows[places if self._stored is None else wanted[places]])
        layer = BroughtLayer.bring(
            FlatBuffer(memory, {"rows": self._segment(len(places))}), self._copy_stream
        )
        return layer.use()["rows"].to(self._weight.dtype).view(*tokens.shape, self.info.shape[1])

    def _as_rows(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(torch_dtype(self.info.dtype)).view(-1, self.info.shape[1])

    def _segment(self, count: int) -> Segment:
        return Segment(0, count * self._row_nbytes, self.info.dtype, (count, self.info.shape[1]))

    def _read(self, numbers: list[int]) -> torch.Tensor:
        rows = torch.empty(len(numbers), self.info.shape[1], dtype=torch_dtype(self.info.dtype))
        memory = memoryview(rows.view(torch.uint8).reshape(-1).numpy())  # type: ignore[arg-type]

        def job(first: int) -> None:
            for index in range(first, min(first + _ROWS_PER_JOB, len(numbers))):
                start = self.info.range.offset + numbers[index] * self._row_nbytes
                target = memory[index * self._row_nbytes : (index + 1) * self._row_nbytes]
                self._files.read_scattered(ByteRange(self.info.range.file, start, self._row_nbytes), target)

        if len(numbers) <= _ROWS_PER_JOB:
            job(0)
        else:
            jobs = [lambda first=first: job(first) for first in range(0, len(numbers), _ROWS_PER_JOB)]
            self._pool.submit(Ticket(jobs)).wait()
        return rows


class _ReadsRowsOnDemand(nn.Embedding):
    """`nn.Embedding` that looks rows up in a file.

    It is the last base of a module's own class, so that `super().forward` finds it.
    """

    hfq_table: EmbeddingTable

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(self.hfq_table.name)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.hfq_table.look_up(input)


def is_table(unit: OffloadUnit) -> bool:
    """Returns True if a unit is a single embedding whose rows can be read one by one."""
    return (
        not unit.quantized
        and len(unit.unquantized) == 1
        and unit.unquantized[0].module is unit.module
        and can_read_rows(unit.unquantized[0])
    )


def can_read_rows(weight: UnquantizedParameter) -> bool:
    """Returns True if a parameter is the table of an embedding that only looks rows up.

    The embedding does so itself, or by `super().forward`.
    """
    module = weight.module
    if not isinstance(module, nn.Embedding) or weight.local != "weight" or module.max_norm is not None:
        return False
    own = type(module).__mro__[: type(module).__mro__.index(nn.Embedding)]
    forwards = [vars(cls)["forward"] for cls in own if "forward" in vars(cls)]
    codes = [getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards]
    names = {name for code in codes for name in getattr(code, "co_names", ("weight",))}
    is_plain = len(weight.info.shape) == 2 and weight.info.shape[0] == module.num_embeddings
    return is_plain and "weight" not in names and len(module._parameters) == 1


def read_rows_on_demand(weight: UnquantizedParameter, table: EmbeddingTable) -> None:
    """Makes an embedding look its rows up in a file; its class keeps its name."""
    cls = type(weight.module)
    bases = (_ReadsRowsOnDemand,) if cls is nn.Embedding else (cls, _ReadsRowsOnDemand)
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    weight.module.__class__ = type(cls.__name__, bases, own)
    weight.module.hfq_table = table  # type: ignore[assignment]
    if hasattr(weight.module, "_old_forward"):  # accelerate's hook calls the method of the former class
        weight.module._old_forward = types.MethodType(type(weight.module).forward, weight.module)  # type: ignore[assignment]
