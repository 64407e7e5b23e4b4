"""Constants of the expected error of a summary."""

from __future__ import annotations

LARGEST_GROWTH = 8.0
"""The largest exponent of the expected growth of a weight."""
LEAST_PLAIN_SPREAD = 0.5
"""The expected error assumes at least this share of the plain spread of a bucket's keys."""
DEVIATIONS_OF_SUSPICION = 2.0
SUSPICION = 16.0
"""A bucket is searched where its summary, if its logit were that many standard deviations higher, would have this many
times the weight that is searched for."""
