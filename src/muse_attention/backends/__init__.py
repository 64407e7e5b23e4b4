"""How a call is computed: `reference/` defines it, `torch/` computes it anywhere, `triton/` on CUDA.

`choice.py` picks the backend of a call. `protocol.py` is the interface that `torch/backend.py` and `triton/backend.py`
implement for the operators.
"""
