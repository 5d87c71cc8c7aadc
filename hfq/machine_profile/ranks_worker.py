"""One rank of a measured run under ZeRO-3: loads models, runs steps, and multiplies.

Run it as `python -m hfq.machine_profile.ranks_worker '{"rank": …, "world": …, "port": …}'`. See
`local_ranks.Ranks` and `worker_process.serve`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from hfq.formats.gptq import Gptq
from hfq.machine_profile.model_probes import Decoder, load_model
from hfq.machine_profile.product_probes import Layer, ProductProbe
from hfq.machine_profile.worker_process import serve
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.launch_configs import deepspeed_config

__all__ = ["RanksWorker"]


class RanksWorker:
    """Answers `load`, `steps`, `held`, `drop`, and `product`.

    Args:
        rank: This rank.
        world: Number of ranks.
        port: Port for their rendezvous on this machine.
    """

    def __init__(self, rank: int, world: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if not torch.accelerator.is_available():
            os.environ |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo needs no compiler
        deepspeed.init_distributed()
        self._engines: dict[str, tuple[Any, Any, Decoder]] = {}
        self._product: ProductProbe | None = None
        self.commands = {name: getattr(self, name) for name in ("load", "steps", "held", "drop", "product")}

    def load(self, path: str) -> dict:
        """Loads a checkpoint, sharded over the devices of the ranks."""
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        config = deepspeed_config()
        alive = HfDeepSpeedConfig(config)
        model = load_model(Path(path), dtype=torch.bfloat16)
        engine = deepspeed.initialize(model=model, config=config)[0]
        self._engines[path] = (engine, model, Decoder(engine))
        del alive
        return {}

    def steps(self, path: str, count: int) -> dict:
        """Returns the seconds of steps of one token, each started after a barrier."""
        decoder, seconds = self._engines[path][2], []
        for _ in range(count + 1):
            torch.distributed.barrier()
            seconds.append(decoder.step())
        return {"seconds": seconds[1:]}

    def held(self, path: str) -> dict:
        """Returns the bytes of this rank's shards, of flat buffers and of all other parameters."""
        model = self._engines[path][1]
        rows = {id(module.flat_buffer) for module in model.modules() if isinstance(module, QuantizedModule)}
        held = {True: 0, False: 0}
        for parameter in model.parameters():
            held[id(parameter) in rows] += parameter.ds_tensor.numel() * parameter.dtype.itemsize
        return {"quantized": held[True], "frozen": held[False]}

    def drop(self, path: str) -> dict:
        """Releases a model."""
        del self._engines[path]
        gc.collect()
        return {}

    def product(self) -> dict:
        """Returns the seconds of a product while all ranks compute one."""
        if self._product is None:
            self._product = ProductProbe(Layer(Gptq(4, 128, False, "stored"), 2048, 2048))
        torch.distributed.barrier()
        return {"seconds": self._product.run()}


if __name__ == "__main__":
    serve(RanksWorker(**json.loads(sys.argv[1])).commands)
