"""How a call is computed: `reference/` defines it, `torch/` computes it anywhere, `triton/` on CUDA.

`choice.py` says which serves a call, and `protocol.py` what the operators ask of it: `torch/backend.py` and
`triton/backend.py` are the answers.
"""
