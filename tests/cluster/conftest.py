"""What tests of the meeting before JAX starts share."""

import pytest

from tests.support.rendezvous_cluster import members_in_threads


@pytest.fixture
def start(monkeypatch):
    """Starts a member of a cluster in a thread; waits for all members in the end."""
    with members_in_threads(monkeypatch) as start_member:
        yield start_member
