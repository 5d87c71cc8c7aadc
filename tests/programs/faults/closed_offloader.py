"""A closed offloader: an error for every forward."""

import torch

from hfq import SetupError
from tests.programs.faults.tools import expected, load, logits, readers, streamer_of

model = load()
assert torch.equal(logits(model), expected)
streamer_of(model).close()
assert not readers()
for _ in range(3):
    try:
        logits(model)
        raise SystemExit("no error")
    except SetupError as error:
        assert "closed" in str(error), error
