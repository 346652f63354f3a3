"""For those who write adapters: the conformance suite that states the promise as tests, and fakes for the pure parts."""

from carpool.testing.conformance import AdapterConformance, Reference, Variant
from carpool.testing.fakes import FakeAdapter, FakeClock, FakeFusedSession, FakeSession, Script
from carpool.testing.pairs import pairwise

__all__ = [
    "AdapterConformance",
    "FakeAdapter",
    "FakeClock",
    "FakeFusedSession",
    "FakeSession",
    "Reference",
    "Script",
    "Variant",
    "pairwise",
]
