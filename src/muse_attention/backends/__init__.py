"""How a call is computed: `reference.py` defines it, `torch/` computes it anywhere, `triton/` on CUDA.

`choice.py` says which serves a call, and `pipeline.py` has the steps that `torch/` and `triton/` share.
"""
