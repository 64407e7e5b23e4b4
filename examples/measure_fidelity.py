"""How far is each attention from exact attention on your own queries, keys and values? Here: synthetic ones."""

from muse_attention import get_attention
from muse_attention.fidelity import measure
from muse_lab.synthetic import clustered_qkv

query, key, value = clustered_qkv(batch=1, heads=2, length=8192, head_dim=64)

for name in ("muse", "muse:QK64R4B1k", "muse:QK32R0B1k,dipole=shared", "moba:L1kB64R1", "block_diagonal:1k"):
    pooled = measure(get_attention(name), query, key, value, is_causal=True).pooled()
    print(f"{name:32} RSE {pooled['relative_squared_error']:.5f}   cosine {pooled['cosine']:.5f}")
