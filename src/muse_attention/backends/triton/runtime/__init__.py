"""Kernel launches: recorded once for a set of shapes, then replayed."""
