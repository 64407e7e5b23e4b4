"""Extend the context of a pretrained model: a plain training loop, with MuSe or exact attention on the same tokens.

    python examples/extend_context.py path/to/model path/to/texts --length 32k --tokens 64m --output out/muse
    python examples/extend_context.py path/to/model path/to/texts --length 32k --tokens 64m --output out/exact \
        --attention exact

The base of the rotary embedding is raised, the model is trained on rows of the new length, and then read with exact
attention: held-out loss by position, before and after. Texts are files, or folders of them; every twentieth file is
held out. The same `--seed` gives the same rows in the same order whatever the attention. After an interruption, run it
again: it goes on from the last checkpoint. `OUTPUT/log.jsonl` has every update, `OUTPUT/result.json` the losses,
`OUTPUT/model` the weights, which any program reads. Needs the extra `huggingface`.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from muse_attention import huggingface
from muse_attention.sizes import format_size, parse_size

SUFFIXES = (".py", ".md", ".rst", ".txt", ".c", ".h", ".cpp", ".js", ".java", ".rs", ".go")
HELD_OUT = 20
"""One file in so many is kept for measuring the loss."""
LOGITS_AT_ONCE = 2048
"""Positions whose logits are held at a time: those of 32k positions and 50k words would take 6 GiB."""


@dataclass(frozen=True)
class Rows:
    """Tokens of files laid end to end, cut into rows of `length + 1`."""

    training: Tensor
    held_out: Tensor


def read_rows(paths: list[Path], tokenizer: Any, length: int) -> Rows:
    files = [path for path in paths if path.is_file()]
    files += [file for path in paths for file in sorted(path.rglob("*")) if file.suffix in SUFFIXES and file.is_file()]
    tokens: dict[bool, list[int]] = {True: [], False: []}
    for number, file in enumerate(files):
        text = file.read_text(encoding="utf-8", errors="replace")
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        tokens[number % HELD_OUT == HELD_OUT - 1] += tokenizer(text, add_special_tokens=False)["input_ids"] + end
        print(f"\rread {number + 1} of {len(files)} files", end="", file=sys.stderr)
    print(file=sys.stderr)
    rows = []
    for is_held_out in (False, True):
        stream = torch.tensor(tokens[is_held_out], dtype=torch.int32)
        number = stream.shape[0] // (length + 1)
        if number == 0:
            what = "held-out files have" if is_held_out else "files have"
            sys.exit(f"{what} {stream.shape[0]} tokens, fewer than a row of {length + 1}: name more texts")
        rows.append(stream[: number * (length + 1)].view(number, length + 1))
    return Rows(*rows)


def order_of_rows(number: int, seed: int) -> Iterator[int]:
    """All rows in random order, again and again."""
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
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    model.gradient_checkpointing_enable()
    return model


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
    with torch.no_grad(), huggingface.use_attention(model, "exact"), autocast(device):
        for number, row in enumerate(rows):
            print(f"\rheld-out row {number + 1} of {len(rows)}", end="", file=sys.stderr)
            total += losses(model, row.to(device)).double().cpu()
    print(file=sys.stderr)
    model.train()
    mean, found, begin = total / len(rows), {"all": float(total.mean() / len(rows))}, 0
    while begin < mean.shape[0]:
        end = min(mean.shape[0], max(1024, 2 * begin))
        found[f"{format_size(begin)} to {format_size(end)}"] = float(mean[begin:end].mean())
        begin = end
    return found


def autocast(device: str) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def learning_rate(update: int, updates: int, peak: float) -> float:
    """A short warm-up, then a cosine to a tenth."""
    warmup = max(1, updates // 20)
    if update < warmup:
        return peak * (update + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


def save(state: dict[str, Any], file: Path) -> None:
    """As a whole or not at all."""
    unfinished = file.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, file)


def train(arguments: argparse.Namespace) -> None:
    output, device, length = Path(arguments.output), arguments.device, parse_size(arguments.length)
    if (output / "result.json").exists():
        sys.exit(f"{output} has a finished run: choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = read_rows([Path(path) for path in arguments.texts], tokenizer, length)
    held_out = rows.held_out[: arguments.held_out_rows]
    updates = max(1, parse_size(arguments.tokens) // (length * arguments.batch))
    model = load(arguments.model, length, arguments.rope_base).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    order, first, before = order_of_rows(len(rows.training), arguments.seed), 0, None
    saved = output / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        wanted = {name: getattr(arguments, name) for name in state["arguments"]}
        if state["arguments"] != wanted:
            changed = next(name for name, setting in wanted.items() if setting != state["arguments"][name])
            sys.exit(f"{saved} was trained with another --{changed.replace('_', '-')}: choose another --output")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, before = state["update"], state["before"]
        for _ in range(first * arguments.batch):
            next(order)
        print(f"going on after update {first} of {updates}", file=sys.stderr)
    before = before or loss_by_position(model, held_out, device)
    kept = {"arguments": settings(arguments), "before": before}
    last_saved = time.monotonic()
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
                row = rows.training[next(order)].to(device)
                # (Backward inside as well: it computes each layer again.)
                with huggingface.use_attention(model, arguments.attention), autocast(device):
                    of_row = losses(model, row).mean() / arguments.batch
                    of_row.backward()
                loss += float(of_row.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - begin
            speed = length * arguments.batch / seconds
            log.write(json.dumps({"update": update + 1, "loss": loss, "seconds": seconds}) + "\n")
            log.flush()
            print(
                f"\rupdate {update + 1} of {updates}: loss {loss:.4f}, {speed:,.0f} tokens/s", end="", file=sys.stderr
            )
            if time.monotonic() - last_saved > arguments.save_every:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "update": update + 1}
                save({**state, **kept}, saved)
                last_saved = time.monotonic()
    print(file=sys.stderr)
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    after = loss_by_position(model, held_out, device)
    result = {"arguments": settings(arguments), "updates": updates, "before": before, "after": after}
    (output / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    saved.unlink(missing_ok=True)
    print(f"{'positions':>16}  before   after  (loss under exact attention)")
    for name in after:
        print(f"{name:>16}  {before[name]:.4f}  {after[name]:.4f}")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a result depends on."""
    return {name: setting for name, setting in vars(arguments).items() if name not in ("output", "save_every")}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="folder of a model of transformers with rotary embeddings, or a name on the hub")
    parser.add_argument("texts", nargs="+", help="files, or folders of them")
    parser.add_argument("--attention", default="muse", help="muse, muse:paper, muse:Q8K32T0.1B2k, exact, ...")
    parser.add_argument("--length", default="32k", help="tokens of a row")
    parser.add_argument("--tokens", default="64m", help="to train on, all in all")
    parser.add_argument("--batch", type=int, default=4, help="rows of an update")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak of the learning rate")
    parser.add_argument("--rope-base", type=float, help="of the rotary embedding; without it, raised with the length")
    parser.add_argument("--held-out-rows", type=int, default=16, help="to measure the loss on")
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows")
    parser.add_argument("--save-every", type=float, default=300, help="seconds between checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", required=True, help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
