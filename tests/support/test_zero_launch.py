"""Tests of the ports of launches."""

import socket

import pytest

from tests.support.zero_launch import free_port


def test_a_free_port_is_for_the_program_that_is_told_of_it():
    port = int(free_port())
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    for _ in range(2):
        socket.create_server(("127.0.0.1", port)).close()
