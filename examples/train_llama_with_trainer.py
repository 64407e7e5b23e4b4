"""Train a small Llama with the Trainer of transformers and MuSe attention, on packed documents: seconds on a CPU.

Needs the extra `huggingface`, and accelerate, which the Trainer needs. Documents are modules of Python's standard
library, byte by byte. The collator lays them end to end, with positions that restart; MuSe attends inside each.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

if importlib.util.find_spec("accelerate") is None:
    sys.exit("the Trainer of transformers needs accelerate: pip install accelerate")

import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from muse_attention import huggingface

STEPS, DOCUMENTS, LENGTH = 12, 2, 640  # of training, in a batch, and the bytes of a document at most

torch.manual_seed(0)
huggingface.register("QK16R2B128")  # 16 clusters, 2 retrieved, blocks of 128: small, as documents are
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    attn_implementation="muse",  # this switches MuSe on
)
model = LlamaForCausalLM(config)
files = sorted(Path(tempfile.__file__).parent.glob("*.py"))
texts = [text[:LENGTH] for file in files if len(text := file.read_bytes()) > 1]
dataset = [{"input_ids": list(text)} for text in texts[: STEPS * DOCUMENTS]]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=DOCUMENTS,
        learning_rate=5e-3,
        logging_steps=4,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,  # leave it out on a GPU
    )
    Trainer(model, arguments, train_dataset=dataset, data_collator=DataCollatorWithFlattening()).train()

# Weights are those of any Llama: exact attention reads them.
tokens = torch.tensor([list(texts[-1])])
with torch.no_grad():
    for attention in ("muse", "sdpa"):
        model.set_attn_implementation(attention)
        print(f"loss with {attention}: {model(tokens, labels=tokens).loss:.5f}")
