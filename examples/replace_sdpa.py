"""Train a tiny transformer layer with MuSe attention, then run the same weights with exact attention."""

import torch
import torch.nn.functional as F

from muse_attention import muse_attention

torch.manual_seed(0)
length, heads, head_dim = 4096, 2, 32
project = torch.nn.Linear(64, 3 * heads * head_dim)
readout = torch.nn.Linear(heads * head_dim, 64)
optimizer = torch.optim.AdamW([*project.parameters(), *readout.parameters()], lr=3e-3)
tokens = torch.randn(1, length, 64)
target = torch.roll(tokens, 1, dims=1)


def loss_with(attention) -> torch.Tensor:
    query, key, value = project(tokens).view(1, length, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
    out = attention(query, key, value, is_causal=True)
    return F.mse_loss(readout(out.transpose(1, 2).flatten(2)), target)


for step in range(5):
    loss = loss_with(muse_attention)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

with torch.no_grad():
    print(f"MuSe attention: {loss_with(muse_attention).item():.4f}")
    print(f"exact attention: {loss_with(F.scaled_dot_product_attention).item():.4f}")
