"""Constants of the expected error of a summary."""

from __future__ import annotations

LARGEST_GROWTH = 8.0
"""Exponent of the growth of a weight that is feared, at most."""
LEAST_PLAIN_SPREAD = 0.5
"""The spread that an error is expected from is at least this share of the plain spread of a bucket's keys."""
