"""Reads runs as JSON, [[imports, [programs]], …]; prints what each program printed, and its error.

What transformers imports, but knows neither it nor hfq, is imported once; each run is a fork that knows
nothing else.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback

import huggingface_hub.hf_api  # noqa: F401
import jinja2  # noqa: F401
import safetensors.torch  # noqa: F401
import tokenizers  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.tensor
import torch.export

torch.set_num_threads(1)
assert not {"transformers", "hfq", "accelerate"} & set(sys.modules)
for imports, programs in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        found = []
        try:
            exec(imports, {})
            for program in programs:
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    runpy.run_path(program)
                found.append([said.getvalue(), ""])
        except BaseException:
            found += [["", traceback.format_exc()]] * (len(programs) - len(found))
        os.write(write, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(write)
    with open(read) as stream:
        print(stream.read(), flush=True)
    os.wait()
