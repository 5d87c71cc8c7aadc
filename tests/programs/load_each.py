"""Loads each checkpoint of the arguments in at most 16 GiB, and prints the error of each as JSON."""

import json
import resource
import sys

from transformers import AutoModelForCausalLM

import hfq

resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
for path in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(path, quantization_config=hfq.HfqConfig())
        print(json.dumps(["nothing", ""]), flush=True)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
