"""Time, memory and error of single calls, against `scaled_dot_product_attention` in the same run.

`muse bench`: `request.py` is one case, with settings that compare fairly, `plan.py` all cases of a run,
or one choice of the method at many values (`sweeps.py`). `workload.py` is what is run, on synthetic data or on heads of
a model (`captured.py`). `timing.py`, `memory.py` and `stages.py` measure, `suite.py` goes through a plan, `results.py`
stores the numbers, and `bench_report.py` shows them, with `tables.py`.

`packed_documents.py`: the same for packed documents. `tuning.py`: many configurations on heads of a model, to find the
fastest below an error or a cost in loss. Each has a report beside it.
"""
