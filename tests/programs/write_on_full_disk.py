"""Writes 1 MiB where files may not exceed 100 kB; prints the error."""

import resource
import sys

import hfq
from hfq.checkpoint import write_safetensors

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_safetensors(sys.argv[1], {"a": ("U8", (1 << 20,), bytes(1 << 20))})
except hfq.CheckpointError as error:
    print(error)
