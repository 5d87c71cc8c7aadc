"""Imports hfq, which must not import PEFT, and then PEFT, which must have hfq's changes."""

import sys

import hfq

assert not {"torch", "transformers", "peft"} & sys.modules.keys()
hfq.HfqConfig  # noqa: B018  (imports what it is defined in)
assert "peft" not in sys.modules
import peft

assert hasattr(peft.PeftModel.save_pretrained, "__wrapped__")
