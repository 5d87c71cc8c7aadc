"""Runs `hfq` with arguments 2 and later where the address space is limited to argument 1, in bytes."""

import resource
import sys

from hfq.cli import main

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
main(sys.argv[2:])
