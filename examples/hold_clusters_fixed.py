"""Find clusters once and reuse them: with clusters held fixed, the paper's method is causal in every respect.

With a tolerance MuSe is so anyway.
"""

import torch

from muse_attention import find_clusters, muse_attention
from muse_lab.synthetic import clustered_qkv

query, key, value = clustered_qkv(batch=1, heads=2, length=4096, head_dim=64)
clusters = find_clusters(query, key, config="QK32R2B512")
out = muse_attention(query, key, value, is_causal=True, config="QK32R2B512", clusters=clusters)

key[:, :, 3000:] = torch.randn_like(key[:, :, 3000:])
value[:, :, 3000:] = torch.randn_like(value[:, :, 3000:])
after = muse_attention(query, key, value, is_causal=True, config="QK32R2B512", clusters=clusters)
print("largest change before position 3000:", (after - out)[:, :, :3000].abs().max().item())
print("largest change from there on:       ", (after - out)[:, :, 3000:].abs().max().item())
