"""Checkpoints of a run, whole or absent, which any number of ranks write and read together.

`store.py`: the folder that they are in, written aside, verified and pruned. `manifest.py`: the files with their hashes,
and which part of which tensor is in which file. `shards.py`: files of tensors. `together.py`: several ranks save and
load through torch.distributed.checkpoint. `agreement.py`: ranks that share the work of verifying come to the same
result.
"""
