"""Time, memory and fidelity of attentions by name, against `scaled_dot_product_attention` in the same run.

`workload.py` is what is run. `timing.py` and `memory.py` measure it. `matched.py` says which settings compare fairly,
with lengths written as in `lengths.py`. `suite.py` goes through lengths and attentions, `results.py` keeps what was
found, `machine.py` says where it was found, and `tables.py` prints it.
"""
