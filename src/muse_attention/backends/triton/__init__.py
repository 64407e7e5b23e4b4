"""The far-field stages in Triton: the same files as in `backends/torch`, for CUDA, without a host synchronisation.

(What is one file there is two here: `selection` chooses, `terms` attends to the summaries that are left.) `limits` says
what the kernels serve, and is imported without Triton.

Everything is laid out by head: `H` query heads of all sequences, `G` key heads, `R = H / G` query heads to each. Query
and key rows are sorted by (block, cluster), so that a segment of queries and a bucket of keys is a range of rows.
Kernels take lengths and counts at run time; head dimensions, the scale and the kind of numbers are compiled in.
"""
