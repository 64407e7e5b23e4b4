"""How long tests wait for what another process does."""

PATIENCE = 1800.0
"""Seconds. Only a process that hangs takes as long, however busy the machine is."""
