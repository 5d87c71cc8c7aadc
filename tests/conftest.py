"""No test waits for a compiler: the compiled kernel is switched off, but where a test asks for it (tests/kernels, tests/contract)."""

import os

os.environ["HFQ_NATIVE"] = "0"
