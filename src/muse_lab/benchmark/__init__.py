"""Time, memory and fidelity of attentions by name, against `scaled_dot_product_attention` in the same run.

`request.py` is what can be asked for, `plan.py` all that is asked for in one run: attentions at lengths, with settings
that compare fairly by `matched.py`, or one choice of the method at many values by `sweeps.py`. `workload.py` is what is
run, on synthetic data or on heads of a model by `captured.py`. `timing.py`, `memory.py` and `stages.py` measure it.
`suite.py` goes through a plan, `results.py` keeps what was found, and `tables.py` and `report.py` print it.
`synthetic_errors.py` tells where attentions err on synthetic data. `tuning/` times many configurations on heads of a
model, to find the fastest below an error.
"""
