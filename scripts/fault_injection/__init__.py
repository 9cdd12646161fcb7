"""The phases of ``scripts/faults``: what is made to fail, and what must hold then."""
