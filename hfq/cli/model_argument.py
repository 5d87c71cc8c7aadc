"""The checkpoint that a command is given, by its folder or by its name on the hub; what was fetched for it is
told.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfq.integrations.hub.find import FoundCheckpoint

__all__ = ["named_checkpoint"]


@contextlib.contextmanager
def named_checkpoint(path: str | os.PathLike) -> Iterator[FoundCheckpoint]:
    """The folder of a checkpoint, during a block; on standard error, how many bytes were fetched of a model
    of the hub.

    Raises:
        CheckpointError: As `hfq.integrations.hub.find.find_checkpoint`.
    """
    from hfq.integrations.hub.find import find_checkpoint

    with find_checkpoint(path) as found:
        if found.commit is not None:
            print(found, file=sys.stderr, flush=True)
        yield found
