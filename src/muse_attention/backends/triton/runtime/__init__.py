"""How kernels are launched: noted once for a set of shapes, then replayed."""
