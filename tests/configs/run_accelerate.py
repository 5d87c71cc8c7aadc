"""One training step, or one forward, under the config of
`accelerate launch --config_file C run_accelerate.py OUT`.

Every rank writes OUT-<rank>.json.
"""

import json
import sys

import torch
from accelerate import Accelerator
from run_deepspeed import digest, small_model
from torch.utils.data import DataLoader
from transformers.integrations import is_deepspeed_zero3_enabled

from tests.support import compiled_io
from tests.support.leaving import leave


def main() -> None:
    compiled_io.use()
    accelerator = Accelerator()  # first: this turns ZeRO-3 on
    trains = "inference" not in sys.argv[1]
    found = {"is_zero3": is_deepspeed_zero3_enabled(), "world": torch.distributed.get_world_size()}
    model = small_model()
    tokens = torch.arange(32) * 7 % 4096
    if trains:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader([tokens] * 2, batch_size=1))
    else:
        model = accelerator.prepare(model)
    model.eval()
    with torch.no_grad():
        found["logits"] = digest(model(input_ids=tokens[None]).logits)
    found["losses"] = []
    for _ in range(2 if trains else 0):
        model.train()
        loss = model(input_ids=tokens[None], labels=tokens[None]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    found["sharded"] = sum(p.ds_tensor.ds_numel for p in model.parameters())
    with open(f"{sys.argv[1]}-{torch.distributed.get_rank()}.json", "w") as stream:
        json.dump(found, stream)
    accelerator.end_training()


if __name__ == "__main__":
    main()
    leave()
