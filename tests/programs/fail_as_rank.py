"""One of two ranks that fail together right after a collective."""

import sys

import torch.distributed as dist

from hfq.errors import SetupError
from hfq.loading.ranks import raise_together

rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
raise_together(SetupError("This rank failed.", fix="Run it again.") if rank else None)
