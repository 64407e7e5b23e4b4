"""Extend the context of a pretrained model: a plain training loop, with MuSe or exact attention on the same tokens.

    python examples/extend_context.py path/to/model path/to/texts --length 32k --attention muse --output out/muse
    python examples/extend_context.py path/to/model path/to/texts --length 32k --attention exact --output out/exact

The base of the rotary embedding is raised, the model is trained on rows of the new length, and measured with exact
attention: held-out loss by position, before and four times on the way. Texts are files, or folders of them; the last
twentieth of the files is held out. The same `--seed` gives the same rows in the same order whatever the attention.
After an interruption, run it again: it goes on from the last checkpoint. OUTPUT/log.jsonl has every update,
OUTPUT/result.json losses and speed, OUTPUT/model the weights for any program. Needs the extra `huggingface`.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import muse_attention
from muse_attention import huggingface
from muse_attention.sizes import format_size, parse_size

SUFFIXES = (".py", ".md", ".rst", ".txt", ".c", ".h", ".cpp", ".js", ".java", ".rs", ".go")
HELD_OUT = 20
"""The last of so many parts of the files is kept for measuring the loss."""
EVALUATIONS = 4
"""After so many equal parts of the updates, the last of them at the end."""
FILES_AT_ONCE, LOGITS_AT_ONCE = 256, 2048
"""Files read, and positions whose logits are held: those of 32k positions and 50k words would take 6 GiB."""


def read_rows(paths: list[Path], tokenizer: Any, length: int) -> list[Tensor]:
    """Tokens of files laid end to end, cut into rows of `length + 1`: those to train on, and those held out."""
    files = [path for path in paths if path.is_file()]
    files += [file for path in paths for file in sorted(path.rglob("*")) if file.suffix in SUFFIXES and file.is_file()]
    tokens: dict[bool, list[int]] = {True: [], False: []}
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    first_held_out = len(files) - max(1, len(files) // HELD_OUT)
    for begin in range(0, len(files), FILES_AT_ONCE):
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files[begin : begin + FILES_AT_ONCE]]
        for number, ids in enumerate(tokenizer(texts, add_special_tokens=False)["input_ids"], begin):
            tokens[number >= first_held_out] += ids + end
        print(f"read {begin + len(texts)} of {len(files)} files", file=sys.stderr)
    rows = []
    for is_held_out in (False, True):
        stream = torch.tensor(tokens[is_held_out], dtype=torch.int32)
        number = len(stream) // (length + 1)
        if number == 0:
            what = "held-out files" if is_held_out else "files"
            sys.exit(f"{what} have {len(stream)} tokens, fewer than a row of {length + 1}: name more texts")
        rows.append(stream[: number * (length + 1)].view(number, length + 1))
    return rows


def order_of_rows(number: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(number, generator=generator).tolist()


def load(folder: str, length: int, rope_base: float | None) -> Any:
    """The model in float32, for rows of a length, with a raised base of its rotary embedding."""
    config = AutoConfig.from_pretrained(folder)
    grown = length / config.max_position_embeddings
    if "rope_theta" not in (getattr(config, "rope_parameters", None) or {}):
        sys.exit(f"{folder} has no rotary embedding with one base, which this example raises: choose another model")
    if grown > 1:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        old = config.rope_parameters["rope_theta"]
        # The slowest rotation turns over the new length as far as it did over the old one.
        base = rope_base or old * grown ** (head_dim / (head_dim - 2))
        config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
        config.max_position_embeddings = length
        print(f"context {format_size(length)}, base of the rotary embedding {old:g} to {base:.4g}", file=sys.stderr)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


def losses(model: Any, row: Tensor) -> Tensor:
    """(length,): the loss of every token of a row but the first."""
    hidden = model.model(input_ids=row[None, :-1].long(), use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings()

    def of_part(part: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(head(part).float(), targets, reduction="none")

    parts = zip(hidden.split(LOGITS_AT_ONCE), row[1:].long().split(LOGITS_AT_ONCE), strict=True)
    return torch.cat([checkpoint(of_part, part, targets, use_reentrant=False) for part, targets in parts])


def loss_by_position(model: Any, rows: Tensor, device: str) -> dict[str, float]:
    """Means over ranges of positions that double, under exact attention."""
    model.eval()
    total = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
    with torch.no_grad(), attending(model, "exact", device):
        for number, row in enumerate(rows):
            print(f"\rheld-out row {number + 1} of {len(rows)}", end="", file=sys.stderr)
            total += losses(model, row.to(device)).double().cpu()
    print(file=sys.stderr)
    model.train()
    mean, found, begin = total / len(rows), {"all": float(total.mean() / len(rows))}, 0
    while begin < len(mean):
        end = min(len(mean), max(1024, 2 * begin))
        found[f"{format_size(begin)} to {format_size(end)}"] = float(mean[begin:end].mean())
        begin = end
    return found


@contextmanager
def attending(model: Any, attention: str, device: str) -> Iterator[None]:
    """An attention in every layer, with products in bfloat16 on a GPU."""
    precision = torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")
    kinds = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with huggingface.use_attention(model, attention), precision, sdpa_kernel(kinds, set_priority=True):
        yield


def learning_rate(update: int, updates: int, peak: float) -> float:
    """A short warm-up, then a cosine to a tenth."""
    warmup = max(1, updates // 20)
    if update < warmup:
        return peak * (update + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


def train(arguments: argparse.Namespace) -> None:
    output, device, length = Path(arguments.output), arguments.device, parse_size(arguments.length)
    if (output / "result.json").exists():
        sys.exit(f"{output} has a finished run: choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows, held_out = read_rows([Path(path) for path in arguments.texts], tokenizer, length)
    print(f"{len(rows)} rows to train on, {len(held_out)} held out", file=sys.stderr)
    held_out = held_out[: arguments.held_out_rows]
    updates = max(1, parse_size(arguments.tokens) // (length * arguments.batch))
    model = load(arguments.model, length, arguments.rope_base).to(device).train()
    if arguments.recompute:
        model.gradient_checkpointing_enable()
    if arguments.compile:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    order, first, measured = order_of_rows(len(rows), arguments.seed), 0, []
    saved = output / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        wanted = {name: getattr(arguments, name) for name in state["arguments"]}
        if state["arguments"] != wanted:
            changed = next(name for name, setting in wanted.items() if setting != state["arguments"][name])
            sys.exit(f"{saved} was trained with another --{changed.replace('_', '-')}: choose another --output")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, measured = state["update"], state["measured"]
        for _ in range(first * arguments.batch):
            next(order)
        print(f"going on after update {first} of {updates}", file=sys.stderr)
    measured = measured or [{"update": 0, "loss": loss_by_position(model, held_out, device)}]
    exact_from, last_saved = round(updates * (1 - arguments.exact_tail)), time.monotonic()
    # (Updates after the checkpoint are done again.)
    lines = (output / "log.jsonl").read_text().splitlines(keepends=True)[:first] if first else []
    with (output / "log.jsonl").open("w") as log:
        log.writelines(lines)
        for update in range(first, updates):
            begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(update, updates, arguments.lr)
            loss = 0.0
            for _ in range(arguments.batch):
                row = rows[next(order)].to(device)
                # (Backward inside as well: with --recompute it computes each layer again.)
                with attending(model, arguments.attention if update < exact_from else "exact", device):
                    of_row = losses(model, row).mean() / arguments.batch
                    of_row.backward()
                loss += float(of_row.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - begin
            print(json.dumps({"update": update + 1, "loss": loss, "seconds": seconds}), file=log, flush=True)
            speed = f"{length * arguments.batch / seconds:,.0f} tokens/s"
            print(f"\rupdate {update + 1} of {updates}: loss {loss:.4f}, {speed}", end="", file=sys.stderr)
            if (update + 1) * EVALUATIONS // updates > update * EVALUATIONS // updates:
                print(file=sys.stderr)
                measured.append({"update": update + 1, "loss": loss_by_position(model, held_out, device)})
            if time.monotonic() - last_saved > arguments.save_every:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "update": update + 1}
                torch.save({**state, "arguments": settings(arguments), "measured": measured}, output / "unfinished")
                os.replace(output / "unfinished", saved)
                last_saved = time.monotonic()
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    logged = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    result = {
        "arguments": settings(arguments),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, muse_attention)},
        "tokens_per_second": round(
            length * arguments.batch / statistics.median(line["seconds"] for line in logged[:exact_from] or logged)
        ),
        "training_losses": [round(line["loss"], 4) for line in logged],
        "held_out": measured,
    }
    (output / "result.json").write_text(json.dumps(result) + "\n")
    saved.unlink(missing_ok=True)
    print(f"{'positions':>16}  before   after  (loss under exact attention)")
    for name, after in measured[-1]["loss"].items():
        print(f"{name:>16}  {measured[0]['loss'][name]:.4f}  {after:.4f}")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: setting for name, setting in vars(arguments).items() if name not in ("output", "save_every")}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.description = str(__doc__).partition("\n")[0]
    parser.add_argument("model", help="Model with rotary embeddings: a directory, or a name on the hub.")
    parser.add_argument("texts", nargs="+", help="Text files, or directories of them.")
    parser.add_argument("--attention", default="muse", help="muse, muse:paper, muse:Q8K32T0.05B2k, exact, ...")
    parser.add_argument("--exact-tail", type=float, default=0, help="Share of updates at the end with exact attention.")
    parser.add_argument("--length", default="32k", help="Row length in tokens; k means 1024.")
    parser.add_argument("--tokens", default="64m", help="Training tokens, m for 2**20; texts with fewer are repeated.")
    parser.add_argument("--compile", action="store_true", help="Compile the layers; they share one graph.")
    parser.add_argument("--recompute", action="store_true", help="Recompute layers in backward, for less memory.")
    parser.add_argument("--batch", type=int, default=4, help="Rows per update.")
    parser.add_argument("--lr", type=float, default=1e-4, help="Peak learning rate.")
    parser.add_argument("--rope-base", type=float, help="Rotary base; None raises it with the length.")
    parser.add_argument("--held-out-rows", type=int, default=16, help="Maximum number of held-out rows.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed of the order of rows.")
    parser.add_argument("--save-every", type=float, default=300, help="Seconds between checkpoints.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda.")
    parser.add_argument("--output", required=True, default=argparse.SUPPRESS, help="Output directory.")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
