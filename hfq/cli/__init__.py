"""The `hfq` command: one file per verb.

No module imports torch before a verb runs that needs it.
"""

from hfq.cli.main import main

__all__ = ["main"]
