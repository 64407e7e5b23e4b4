"""A pretrained model under MuSe attention, without retraining: its loss against that under exact attention.

Needs the extras `huggingface` and `smollm2`, or the folder of another model as the argument.
"""

import sys

import torch

from muse_attention.huggingface import use_attention
from muse_lab.evaluation.texts import read_samples
from muse_lab.models import load_model

model, tokenizer = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
tokens = read_samples(tokenizer, [], length=4096, number=1).tokens  # of Python's standard library

for attention in ("exact", "muse:QK16R1B512", "muse:QK32R2B512", "muse:QK64R4B512", "block_diagonal:512"):
    with torch.no_grad(), use_attention(model, attention):
        print(f"{attention:20} loss {model(tokens, labels=tokens, use_cache=False).loss:.4f}")
