"""Addresses that lead nowhere are a sentence, in seconds."""

from __future__ import annotations

import socket

import pytest

from orchestrator.cluster import connect


def test_an_address_at_which_nobody_answers() -> None:
    with socket.socket() as taken:  # bound but not listening: nobody can answer here
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no Ray cluster answers at {address}"), connect(address):
            pass


def test_a_dashboard_is_not_a_cluster() -> None:
    with pytest.raises(ValueError, match="is the dashboard of a Ray cluster"), connect("http://127.0.0.1:8265"):
        pass
