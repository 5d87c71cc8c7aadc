"""Tests that a rank ends normally while a gloo thread still releases what it has sent."""

from tests.support import programs
from tests.support.zero_launch import free_port


def test_it_ends_well_and_does_what_is_to_be_done_at_exit():  # aborts without `leave`
    done = programs.run("leave_while_sending", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["lets go", "at exit"]
