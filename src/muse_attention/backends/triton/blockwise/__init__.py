"""Blockwise MuSe in Triton: clusters of each block, flat summaries, and retrieval by tiles of queries.

`clustering` and `sorting` lay out the queries and keys of each block by cluster; keys stay where they are, and are read
through an order. `heads` is what every pass reads, `rows` finds the residuals of the queries. `summaries` describes
every bucket to the query centroids that may see it. `forward` starts from the own block's output and lse, passes over
the summaries, decides, and attends to what was retrieved, which `pieces` lists. The gradients go to queries
(`backward_to_queries`), to summaries (`backward_to_summaries`), and to keys and values (`backward_to_keys`).

`S` are generations, `T` the blocks that all generations have summaries of, together (`core/generations.py`); a
*column* is the summary of a bucket. Sorted keys lie in pieces of `PIECE` places of one bucket, so that the pieces of
any retrieved buckets can be put together to a full tile of keys.
"""
