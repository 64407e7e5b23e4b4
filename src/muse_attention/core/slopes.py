"""How far the first-order correction of the values of summaries is trusted."""

TILT_OF_SLOPE = 0.5
"""A slope weighs keys by this share of the mean query centroid. A query weighs its keys by its whole centroid, but the
buckets that weigh most are retrieved, and not corrected."""
LARGEST_REACH = 2.0
"""In standard deviations of a query's logits: queries further off their centroid are corrected as if at this reach."""
