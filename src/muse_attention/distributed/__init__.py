"""Attention over a device mesh.

- `ulysses`: sequences are sharded; each rank attends with some of the heads to whole sequences. `all_to_all.py` has the
  two exchanges, `ulysses_attention.py` the attention between them, and `agreement.py` what ranks must have in common.
- `remote_attention` and `merge_partials`: a shard of queries attends to one shard of keys after another, and the
  results merge as one softmax, as in a ring (`examples/ring.py`): `remote.py`.
- `from_rank_before`, in `all_to_all.py`: what a sliding window needs of the rank before.
"""

from muse_attention.distributed.all_to_all import heads_to_sequence, sequence_to_heads
from muse_attention.distributed.remote import merge_partials, remote_attention
from muse_attention.distributed.ulysses_attention import ulysses, ulysses_bytes

__all__ = [
    "heads_to_sequence",
    "merge_partials",
    "remote_attention",
    "sequence_to_heads",
    "ulysses",
    "ulysses_bytes",
]
