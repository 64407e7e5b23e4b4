"""MuSe in other trainers: one file for each, which imports the trainer.

`torchtitan.py`, `olmo_core.py` and `megatron.py` hand queries, keys, values and document boundaries to `rows.py`. For
models of transformers, and so for its Trainer and for Accelerate, there is `muse_attention.huggingface`.
"""
