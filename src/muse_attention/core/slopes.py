"""How far the first-order correction of the values of summaries is trusted."""

TILT_OF_SLOPE = 0.5
"""The weights of keys in a slope are those of so much of the mean query centroid. A query weighs its keys by all of its
own, but the buckets that weigh most are retrieved, and have no part in what is corrected."""
LARGEST_REACH = 2.0
"""A query that is off its centroid by more standard deviations of its logits than that is corrected as if by that."""
