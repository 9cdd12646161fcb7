"""Fixtures of a hub on this machine."""

from hub_fixtures import checkpoint, hub, inside, program, reference, served

__all__ = ["checkpoint", "hub", "inside", "program", "reference", "served"]
