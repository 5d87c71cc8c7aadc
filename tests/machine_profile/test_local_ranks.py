"""Tests of the port of local ranks."""

import contextlib
import socket

import pytest

from hfq.machine_profile import local_ranks


def test_no_other_program_gets_the_port_before_rank_0_listens(monkeypatch):
    ports = []

    def worker(module, rank, world, port):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        ports.append(port)
        return contextlib.nullcontext()

    monkeypatch.setattr(local_ranks, "Worker", worker)
    with local_ranks.Ranks("a module", 2):
        socket.create_server(("127.0.0.1", ports[0])).close()
    assert len(ports) == 2
    assert len(set(ports)) == 1
