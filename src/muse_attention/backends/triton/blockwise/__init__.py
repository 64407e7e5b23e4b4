"""Blockwise MuSe in Triton: clusters of each block, flat summaries, and retrieval by tiles of queries.

`clustering` and `sorting` order the queries and keys of each block by cluster; keys are not moved, but read through the
order. `heads` has what every pass reads, `rows` computes the residuals of the queries. `summaries` computes a summary
of every bucket for each query centroid that may see it. `decisions` finds what to retrieve. `forward` starts from the
own block's output and lse, and attends to the summaries of the rest and to retrieved keys, by the lists of `pieces`.
Gradients go to queries (`backward_to_queries`), to summaries (`backward_to_summaries`), and to keys and values
(`backward_to_keys`).

`S` is the number of generations, `T` the number of blocks summarised in all of them (`core/generations.py`); a *column*
is the summary of a bucket. The sorted keys of a bucket are padded to pieces of `PIECE` places, so that pieces of any
retrieved buckets can be combined to a full tile of keys.
"""
