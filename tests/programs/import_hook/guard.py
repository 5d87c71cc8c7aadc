"""Prints the classes of the errors of two loads that must fail, each before transformers looks for a file."""

from transformers import AutoModelForCausalLM

import hfq

for path, options in (("/nope/x", {}), ("/nope", {"gguf_file": "x"})):
    try:
        AutoModelForCausalLM.from_pretrained(path, quantization_config=hfq.HfqConfig(), **options)
    except hfq.HfqError as error:
        print(type(error).__name__)
