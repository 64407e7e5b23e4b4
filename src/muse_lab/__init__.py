"""The laboratory of `muse_attention`: the `muse` command, pretraining, evaluation, benchmarks, reports, records.

It imports the library, never the other way.
"""
