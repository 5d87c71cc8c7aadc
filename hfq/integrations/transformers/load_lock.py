"""The lock that each load of a process holds.

transformers changes global state while it loads, so two loads in threads would disturb each other.
"""

from __future__ import annotations

import os
import threading

__all__ = ["one_load"]

_lock = threading.RLock()


def one_load() -> threading.RLock:
    """Returns the lock that each load of this process holds."""
    return _lock


def _new_lock() -> None:
    """Creates a new lock in the child of a fork.

    Otherwise the child would wait for a load that only its parent runs.
    """
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
