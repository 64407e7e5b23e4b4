"""Causal attention in a ring of two processes: each holds half of the tokens, keys and values go round.

A rank attends causally to its own keys, to the shards before its own with `remote_attention`, and merges the results
into one softmax with `merge_partials`. The outcome is checked against attention to whole sequences in one process.
"""

import multiprocessing
import os
import socket

import torch
import torch.distributed as dist
from torch import Tensor

from muse_attention import get_attention
from muse_attention.distributed import merge_partials, remote_attention
from muse_attention.fidelity import position_error
from muse_lab.synthetic import clustered_qkv

RANKS = 2


class PassOn(torch.autograd.Function):
    """Send a tensor to a neighbour and receive that of the other neighbour. Gradients go the other way round."""

    @staticmethod
    def forward(ctx, tensor: Tensor, step: int) -> Tensor:
        ctx.step = step
        rank, ranks = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(tensor)
        sending = dist.P2POp(dist.isend, tensor.contiguous(), (rank + step) % ranks)
        receiving = dist.P2POp(dist.irecv, received, (rank - step) % ranks)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return PassOn.apply(gradient, -ctx.step), None


def ring_attention(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention to a sequence of which each rank holds one part, (batch, heads, length / ranks, head_dim)."""
    out, lse = get_attention(name)(query, key, value, is_causal=True, return_lse=True)
    travelling = torch.stack([key, value])
    for step in range(1, dist.get_world_size()):
        travelling = PassOn.apply(travelling, 1)
        if dist.get_rank() >= step:
            remote = remote_attention(name, query, *travelling)
            out, lse = merge_partials([out, remote[0]], [lse, remote[1]])
        else:  # a later shard: not seen, but the backward pass of every rank must pass its gradient on
            out = out + 0 * travelling.sum()
    return out


def check(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    whole = [tensor.requires_grad_() for tensor in clustered_qkv(1, 2, 2048, 32, dtype=torch.float64)]
    shards = [tensor.detach().chunk(RANKS, 2)[rank].requires_grad_() for tensor in whole]
    exact = get_attention("exact")(*whole, is_causal=True)
    exact_gradients = torch.autograd.grad(exact.square().sum(), whole)
    for name in ("exact", "muse:QK16R4B128"):
        out = ring_attention(name, *shards)
        gradients = torch.autograd.grad(out.square().sum(), shards)
        in_one_process = get_attention(name)(*whole, is_causal=True).chunk(RANKS, 2)[rank]
        expected = exact.chunk(RANKS, 2)[rank]
        error, error_of_one = (float(position_error(found, expected).mean()) for found in (out, in_one_process))
        print(f"rank {rank}, {name}: RSE {error:.2e} of the ring, {error_of_one:.2e} of one process", flush=True)
        if name == "exact":
            torch.testing.assert_close(out, expected)
            for found, gradient in zip(gradients, exact_gradients, strict=True):
                torch.testing.assert_close(found, gradient.chunk(RANKS, 2)[rank])
        else:
            assert error <= 2 * error_of_one
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=check, args=(rank, port)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("the ring differs from attention in one process")
    print("the ring agrees with attention in one process")
