"""Runs examples/quantize_tiny_gptq.py, in the folder of the first argument, with six short documents."""

import sys

sys.path.insert(0, sys.argv[1])
import pydoc_data.topics

import quantize_tiny_gptq as script

script.read_documents = lambda: [
    text[:1200] for text in sorted(pydoc_data.topics.topics.values(), key=len)[-6:]
]
sys.argv = ["quantize_tiny_gptq.py", *sys.argv[2:]]
script.main()
