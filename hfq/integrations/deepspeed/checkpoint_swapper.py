"""Reader of ZeRO-3 shards from the checkpoint instead of from swap files.

DeepSpeed's swapper copies every shard to a separate file when a model is loaded, in one dtype, through
libaio. `CheckpointSwapper` replaces it (`deepspeed.zero.Init(param_swapper=…)`,
swap_tensor/partitioned_param_swapper.py of DeepSpeed 0.19.8). It writes no files and does not use libaio.

A gathered shard can be changed, so that it differs from the file. The swapper then keeps it in CPU memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from hfq.checkpoint import Reader
from hfq.checkpoint.direct_io import DIRECT_ALIGNMENT, DirectFiles
from hfq.errors import PlacementError
from hfq.integrations.deepspeed.private_api import shard_status
from hfq.offload.host_memory import huge_buffer
from hfq.placement.zero.shards import ShardRead
from hfq.tensor_spec import ByteRange

__all__ = ["CheckpointSwapper", "ShardSource"]

_THREADS = 4
_CHUNK = 8 << 20


@dataclass(frozen=True)
class ShardSource:
    """Location of one rank's shard of one parameter in the checkpoint.

    Attributes:
        reads: The reads that fill the shard. Bytes that no read fills are zero.
        nbytes: Size of the shard in bytes, in the stored dtype.
        dtype: The stored dtype.
    """

    reads: tuple[ShardRead, ...]
    nbytes: int
    dtype: torch.dtype


class CheckpointSwapper:
    """Parameter swapper that reads shards from the files of a checkpoint.

    Args:
        reader: The checkpoint's reader.
        is_direct: True if reads bypass the page cache.

    Attributes:
        window: Number of shards in memory at which DeepSpeed stops prefetching. The shards of one module may
            exceed it.
        nbytes_read: Bytes swapped in.
        nbytes_written: Bytes swapped out, always 0.
        most_nbytes: Largest number of bytes that the buffers of swapped-in shards occupied at one time.
    """

    def __init__(self, reader: Reader, is_direct: bool = False) -> None:
        self._reader = reader
        self._files = DirectFiles(reader)
        self._is_direct = is_direct
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hfq-swap")
        self._sources: dict[int, ShardSource] = {}
        self._changed: dict[int, torch.Tensor] = {}
        self._loaned: dict[int, torch.Tensor] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._pending: list[tuple[Any, torch.Tensor, list[Future]]] = []
        self._lock, self._local = threading.Lock(), threading.local()
        self.window = 8
        self.nbytes_read = 0
        self.nbytes_written = 0
        self.most_nbytes = 0

    def place(self, parameter: Any, source: ShardSource) -> None:
        """Registers the source of a partitioned parameter's shard, and leaves the shard on disk."""
        self._sources[parameter.ds_id] = source
        parameter.ds_tensor.data = self._blank(parameter)
        parameter.ds_tensor.status = shard_status().NOT_AVAILABLE

    # The interface that DeepSpeed calls.

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Returns False: shards that no checkpoint file holds, such as adapters, stay in CPU memory."""
        return False

    def available_swap_in_buffers(self) -> int:
        """Returns the number of shards that DeepSpeed may prefetch."""
        return max(0, self.window - len(self._loaned))

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Returns an empty tensor, because a shard that is about to be placed stays on disk."""
        return torch.empty(0, dtype=param.dtype)

    def swap_in(self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        """Starts to read shards, and waits for them unless `async_op` is True."""
        for parameter in params:
            buffer = self._borrow(parameter)
            self._pending.append((parameter, buffer, self._begin(parameter, buffer)))
            parameter.ds_tensor.status = shard_status().INFLIGHT
        if not async_op:
            self.synchronize_reads()

    def synchronize_reads(self) -> None:
        """Waits for all reads that have started.

        Raises:
            CheckpointError: A file was truncated or replaced, or the disk failed.
        """
        pending, self._pending = self._pending, []
        for parameter, buffer, jobs in pending:
            for job in jobs:
                job.result()
            parameter.ds_tensor.data = self._as_shard(parameter, buffer)
            parameter.ds_tensor.status = shard_status().AVAILABLE

    def synchronize_writes(self) -> None:
        """Does nothing, because shards are never written."""

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Reads the shard of a trained parameter into DeepSpeed's buffer, where it stays."""
        self.swap_in([param], async_op=False)
        dest_buffer.copy_(param.ds_tensor.data)
        self.remove_partition_and_release_buffers([param])

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Frees the memory of shards, which can be read again."""
        for parameter in params:
            buffer = self._loaned.pop(parameter.ds_id, None)
            if buffer is not None:
                self._free.setdefault(buffer.numel(), []).append(buffer)
            parameter.ds_tensor.data = self._blank(parameter)
            parameter.ds_tensor.status = shard_status().NOT_AVAILABLE

    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Frees shards that were partitioned again, and keeps changed shards in CPU memory."""
        for parameter in params:
            shard = parameter.ds_tensor.data
            if parameter.ds_id in self._changed or not self._equals_file(parameter, shard):
                self._changed[parameter.ds_id] = shard.clone()
        self.remove_partition_and_release_buffers(params)

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Keeps the shards that the optimizer updated in CPU memory."""
        for parameter, values in zip(dst_fp16_params, src_fp32_params, strict=True):
            self._changed[parameter.ds_id] = values.to(parameter.dtype)

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Does nothing, because shards need no swap files."""

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """Returns an empty list, because no buffer serves other purposes."""
        return []

    def release_reserved_buffers(self) -> None:
        """Does nothing, because no buffers are reserved."""

    def get_path(self, param: Any, must_exist: bool = False) -> str:
        """Raises an error, because no file holds one shard alone.

        Raises:
            PlacementError: Always.
        """
        raise PlacementError(
            "An optimizer on NVMe requires a separate file for a trained parameter that is stored in the "
            "checkpoint.",
            expected="frozen parameters in the checkpoint",
            found=f"trained parameter {param.ds_id} of shape {list(param.ds_shape)}",
            fix='Pass HfqConfig(nvme_source="swap_files"), raise offload_param.max_in_cpu, or freeze the '
            "parameter.",
        )

    @staticmethod
    def _blank(parameter: Any) -> torch.Tensor:
        return torch.empty(0, dtype=parameter.dtype)

    def _borrow(self, parameter: Any) -> torch.Tensor:
        nbytes = (
            -(-max(parameter.ds_tensor.ds_numel * parameter.dtype.itemsize, 1) // DIRECT_ALIGNMENT)
            * DIRECT_ALIGNMENT
        )
        free = self._free.get(nbytes)
        buffer = (
            free.pop()
            if free
            else torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
        )
        self._loaned[parameter.ds_id] = buffer
        self.most_nbytes = max(self.most_nbytes, sum(loaned.numel() for loaned in self._loaned.values()))
        return buffer

    @staticmethod
    def _as_shard(parameter: Any, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[: parameter.ds_tensor.ds_numel * parameter.dtype.itemsize].view(parameter.dtype)

    def _begin(self, parameter: Any, buffer: torch.Tensor) -> list[Future]:
        target = self._as_shard(parameter, buffer)
        changed = self._changed.get(parameter.ds_id)
        if changed is not None:
            target.copy_(changed)
            return []
        source = self._sources[parameter.ds_id]
        if source.dtype != parameter.dtype:
            return [self._threads.submit(self._read_cast, source, target)]
        # NumPy arrays support the buffer protocol.
        memory = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]
        return [self._threads.submit(self._read, *job) for job in self._chunks(source, memory)]

    @staticmethod
    def _chunks(source: ShardSource, memory: memoryview) -> list[tuple[ByteRange, memoryview]]:
        """Returns reads of bounded size with their target memory, and zeroes all other bytes."""
        jobs, end = [], 0
        for read in source.reads:
            memory[end : read.offset] = bytes(read.offset - end)
            for done in range(0, read.source.nbytes, _CHUNK):
                nbytes = min(_CHUNK, read.source.nbytes - done)
                cut = ByteRange(read.source.file, read.source.offset + done, nbytes)
                jobs.append((cut, memory[read.offset + done : read.offset + done + nbytes]))
            end = read.offset + read.source.nbytes
        memory[end:] = bytes(len(memory) - end)
        return jobs

    def _read(self, source: ByteRange, target: memoryview) -> None:
        if self._is_direct:
            lead = source.offset % DIRECT_ALIGNMENT
            needed = lead + source.nbytes
            bounce = self._bounce()[: -(-needed // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT]
            self._files.read_direct(ByteRange(source.file, source.offset - lead, needed), bounce)
            target[:] = bounce[lead:needed]
        else:
            self._reader.read_into(source, target)
        with self._lock:
            self.nbytes_read += source.nbytes

    def _bounce(self) -> memoryview:
        """Returns this thread's aligned buffer for direct reads.

        It holds one chunk and the partial pages at both ends.
        """
        if not hasattr(self._local, "bounce"):
            self._local.bounce = memoryview(huge_buffer(_CHUNK + 2 * DIRECT_ALIGNMENT).numpy())  # type: ignore[arg-type]
        return self._local.bounce

    def _read_cast(self, source: ShardSource, target: torch.Tensor) -> None:
        stored = torch.empty(source.nbytes, dtype=torch.uint8)
        for job in self._chunks(source, memoryview(stored.numpy())):  # type: ignore[arg-type]
            self._read(*job)
        target.copy_(stored.view(source.dtype))

    def _equals_file(self, parameter: Any, shard: torch.Tensor) -> bool:
        source = self._sources.get(parameter.ds_id)
        if source is None:
            return False
        buffer = torch.empty(shard.numel(), dtype=shard.dtype)
        self._read_cast(source, buffer)
        return torch.equal(buffer.view(torch.uint8), shard.cpu().view(torch.uint8))
