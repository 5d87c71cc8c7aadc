"""Ends a forked child at its k-th call that changes the disk, as a kill at this moment would."""

import os
import sys
import traceback

_KILLED = 77
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def is_killed(action, folder, number):
    """Runs an action in a forked child, and returns True if it was killed before its end.

    Args:
        action: Function without arguments.
        folder: Folder in which opened files count.
        number: The call before which the child ends, from 1. 0 lets it finish.
    """
    child = os.fork()
    if not child:
        try:
            _kill_at(number, str(folder))
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, _KILLED):
        raise RuntimeError(f"The child ended with status {status}.")
    return status == _KILLED


def _kill_at(number, folder):
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        if calls == number:
            os._exit(_KILLED)

    def audit(event, arguments):
        if event in _CHANGES or (
            event == "open" and arguments[2] & _WRITES and str(arguments[0]).startswith(folder)
        ):
            count()

    def fsync(descriptor, original=os.fsync):
        count()
        original(descriptor)

    os.fsync = fsync
    sys.addaudithook(audit)
