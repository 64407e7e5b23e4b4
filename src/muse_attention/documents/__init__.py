"""Packed documents: many in one row of tokens, each attending to itself alone.

`boundaries.py` says where they lie, `varlen.py` is the call with the names of FlashAttention.
"""
