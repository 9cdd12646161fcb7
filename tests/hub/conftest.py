"""Fixtures of a hub on this machine."""

from hub_fixtures import checkpoint, hf_home, hub, inside, program, reference, served

__all__ = ["checkpoint", "hf_home", "hub", "inside", "program", "reference", "served"]
