"""`python -m hfq` is `hfq`."""

from hfq.cli import main

main()
