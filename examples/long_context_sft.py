"""Fine-tune a model on long documents or conversations with TRL's SFTTrainer and MuSe attention.

    python examples/long_context_sft.py conversations.jsonl --length 32k --output out/sft
    accelerate launch --num_processes 8 examples/long_context_sft.py conversations.jsonl --length 32k --output out/sft

Each line of the data is a JSON object with `messages` (needs a model with a chat template), with `prompt` and
`completion`, or with `text`. TRL packs samples into rows of `--length` tokens; those of one row do not see each other.
Samples of up to 8k tokens are attended to exactly, longer ones with MuSe, unless `--attention` names a configuration.
The same command again goes on from the last checkpoint in `--output`. The result is a folder that any program reads.
Needs the extra `huggingface`, and trl: pip install trl.
"""

import argparse
import importlib.util
import os
import sys

if importlib.util.find_spec("trl") is None:
    sys.exit("SFTTrainer needs TRL: pip install trl")

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from muse_attention import huggingface
from muse_attention.sizes import format_size, parse_size


def make_trainer(arguments: argparse.Namespace) -> SFTTrainer:
    length = parse_size(arguments.length)
    settings = AutoConfig.from_pretrained(arguments.model).get_text_config()
    longest = getattr(settings, "max_position_embeddings", length)
    if length > longest:
        sys.exit(f"{arguments.model} was made for {format_size(longest)} tokens: pass --length {format_size(longest)}")
    has_gpu = torch.cuda.is_available()
    kind, _, config = arguments.attention.partition(":")
    if kind not in ("muse", "exact"):
        sys.exit(f"--attention {arguments.attention}: write exact, muse, or muse: and a configuration")
    if kind == "muse":
        huggingface.register(config or None)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model,
        attn_implementation="muse" if kind == "muse" else "sdpa",  # this switches MuSe on
        dtype=torch.float32,  # small updates would be lost in bfloat16, in which a GPU computes
    )
    settings = SFTConfig(
        output_dir=arguments.output,
        max_length=length,
        packing=True,
        per_device_train_batch_size=1,  # rows
        gradient_accumulation_steps=arguments.rows,
        max_steps=arguments.steps,
        num_train_epochs=arguments.epochs,
        learning_rate=arguments.lr,
        lr_scheduler_type="cosine",
        warmup_steps=arguments.warmup,
        gradient_checkpointing=True,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        logging_steps=arguments.log_every,
        save_steps=arguments.save_every,
        save_total_limit=2,
        report_to="none",
        seed=arguments.seed,
    )
    return SFTTrainer(
        model,
        settings,
        train_dataset=load_dataset("json", data_files=arguments.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("data", nargs="+", help="files of JSON lines")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="a folder, or a name on the hub")
    parser.add_argument("--attention", default="muse", help="muse, muse:Q8K32T0.1B2k, ..., or exact")
    parser.add_argument("--length", default="32k", help="tokens per row; longer samples are cut")
    parser.add_argument("--rows", type=int, default=4, help="rows per update and GPU")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--steps", type=int, default=-1, help="number of updates, instead of epochs")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="number of warm-up updates")
    parser.add_argument("--log-every", type=int, default=1, help="updates between log lines")
    parser.add_argument("--save-every", type=int, default=100, help="updates between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True, help="output directory")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    trainer = make_trainer(arguments)
    last = get_last_checkpoint(arguments.output) if os.path.isdir(arguments.output) else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
