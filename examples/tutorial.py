"""Ten minutes with MuSe attention on a CPU. docs/start/tutorial.md shows this script with its output.

`# %%` begins a step: its title, a text, and code. `[tests: name = value]` is the size that tests take.
"""

# %% A long sequence [tests: length = 2048]
# MuSe is for long sequences, so take one of 32k tokens: two heads of 64. Queries and keys form clusters, as in a
# trained model, and one query in fifty is a lookup: it wants one particular key, far back. Time a forward and backward
# pass of exact attention and of MuSe, the best of three.

import time

import torch

from muse_attention import exact_attention, muse_attention
from muse_lab.synthetic import clustered_qkv

length = 32768
query, key, value = (tensor.requires_grad_() for tensor in clustered_qkv(1, 2, length, 64, lookups=0.02))


def seconds_of(attention):
    best = float("inf")
    for _ in range(3):
        query.grad = key.grad = value.grad = None
        start = time.perf_counter()
        attention(query, key, value, is_causal=True).sum().backward()
        best = min(best, time.perf_counter() - start)
    return best


print(f"forward and backward on {length} tokens, the best of three:")
exact = seconds_of(exact_attention)
print(f"exact {exact:.2f} s")
muse = seconds_of(muse_attention)
print(f"MuSe  {muse:.2f} s: {exact / muse:.1f}x as fast")

# %% What it costs in accuracy
# `fidelity.measure` compares the outputs of an attention with those of exact attention. RSE is the squared distance of
# the two as a share of the exact one's squared norm, averaged over queries. A mean can hide a tail, so look at the
# worst queries too. Where a summary is expected to be too wrong, a query *retrieves* its keys and attends to them
# exactly. Lookups need that. The lookups here resemble no earlier query, so they lie far from every query centroid, and
# the default misses most of them. `caution` expects a larger error far from a centroid, and finds them. In heads of
# SmolLM2, lookup queries recur, and the default finds 9 in 10.

from muse_attention import MuSeConfig, fidelity, get_attention

print("error of MuSe:")
default = MuSeConfig.for_length(length)
nothing, cautious = default.replace(tolerance=float("inf")), default.replace(caution=2.0)
right = exact_attention(query, key, value, is_causal=True, return_lse=True)
for label, config in (("MuSe", default), ("MuSe, nothing retrieved", nothing), ("MuSe, cautious", cautious)):
    found = fidelity.measure(get_attention(f"muse:{config}"), query, key, value, exact=right, is_causal=True).pooled()
    print(label)
    print(f"  RSE                          {found['relative_squared_error']:.4f}")
    print(f"  99% of queries are below     {found['error_p99']:.4f}")
    print(f"  queries that retrieve        {found['share_retrieving']:.1%}")
    print(f"  keys retrieved per query     {found['keys_per_query']:.0f} of up to {length}, on average")

# %% Error against speed [tests: length = 2048; tolerances = ("0.1",)]
# A configuration is a short text. `T` is the tolerance: a query retrieves where a summary's expected error is that or
# more. A smaller tolerance retrieves more keys. MoBA and block-diagonal attention are faster and much less accurate.

length = 16384
query, key, value = (tensor.requires_grad_() for tensor in clustered_qkv(1, 1, length, 64, lookups=0.02))
tolerances = ("inf", "0.4", "0.2", "0.1", "0.05")
names = [f"muse:Q16K64T{tolerance}B1k,caution=2" for tolerance in tolerances]
print(f"{'attention':30}   time   RSE      keys per query")
for name in ["exact", *names, "moba:L1kB64R1", "block_diagonal:1k"]:
    attention = get_attention(name)
    found = fidelity.measure(attention, query, key, value, is_causal=True).pooled()
    error, keys = found["relative_squared_error"], found.get("keys_per_query", 0)
    print(f"{name:30} {seconds_of(attention):4.2f} s   {error:.4f}   {keys:.0f}")

# %% Gradients
# MuSe is differentiable. Here the error of the output and of each gradient is the sum of all squared differences from
# exact attention, as a share of the sum of all squares. The query's gradient has the largest error.


def output_and_gradients_of(attention):
    query.grad = key.grad = value.grad = None
    out = attention(query, key, value, is_causal=True)
    out.square().sum().backward()
    return out.detach(), query.grad, key.grad, value.grad


print("the default against exact attention:")
pairs = zip(output_and_gradients_of(muse_attention), output_and_gradients_of(exact_attention), strict=True)
for name, (approximate, right) in zip(("output", "dquery", "dkey", "dvalue"), pairs, strict=True):
    print(f"{name:6} {(approximate - right).square().sum() / right.square().sum():.4f}")

# %% Train with MuSe, run with exact attention [tests: steps = 2]
# Every token has a topic and a noisy copy of the topic's meaning. One attention layer learns to output the meaning
# without the noise: it must find earlier tokens of the same topic and average them. It trains with MuSe. Then the
# same weights run with exact attention.

import torch.nn.functional as F

torch.manual_seed(0)
steps = 60
topics, meanings = torch.randn(32, 16), torch.randn(32, 16)
topic = torch.randint(32, (1, 2048))
tokens = torch.cat([topics[topic], meanings[topic] + 2 * torch.randn(1, 2048, 16)], dim=-1)
query_layer, key_layer, value_layer = (torch.nn.Linear(32, 32) for _ in range(3))
readout = torch.nn.Linear(32, 16)
layers = torch.nn.ModuleList([query_layer, key_layer, value_layer, readout])
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)


def loss_with(attention):
    heads = (layer(tokens)[:, None] for layer in (query_layer, key_layer, value_layer))
    return F.mse_loss(readout(attention(*heads, is_causal=True)[:, 0]), meanings[topic])


for step in range(steps):
    loss = loss_with(muse_attention)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}")
with torch.no_grad():
    print(f"trained:  loss {loss_with(muse_attention):.3f} with MuSe")
    print(f"          loss {loss_with(exact_attention):.3f} with exact attention")

# %% The leak
# No later token changes an output: keys are clustered inside their blocks, and queries use the centroids of earlier
# queries. The paper's method clusters the whole sequence, so a later token can change the approximation error of an
# earlier output. Replace the last quarter of a sequence and see how much the outputs before it change.

query, key, value = clustered_qkv(1, 1, 2048, 64)
for label, config in (("MuSe", "Q16K32T0.02B256"), ("the paper's method", "QK32R2B256")):
    attention = get_attention(f"muse:{config}")
    error = fidelity.measure(attention, query, key, value, is_causal=True).pooled()["relative_squared_error"]
    leak = fidelity.future_influence(attention, query, key, value, 1536)
    print(f"{label:18} approximation error {error:.4f}  leak {leak:.4f}")
