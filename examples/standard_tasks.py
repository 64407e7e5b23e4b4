"""Evaluate a model on standard tasks with lm-eval, under exact attention or with MuSe in prefill.

    python examples/standard_tasks.py out/muse/model --tasks arc_easy,sciq --output out/exact.json
    python examples/standard_tasks.py out/muse/model --tasks 'niah_*' --metadata '{"max_seq_lengths": [65536]}' \
        --attention muse --output out/muse.json

Data, prompts and scores are lm-eval's own, and decoding is always exact. The model is a folder, that of `muse train`
too, or a name on the hub. Needs the extra `evaluation`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from muse_attention import get_attention
from muse_attention.core.extras import how_to_install
from muse_attention.huggingface import use_attention
from muse_lab.models import find_folder, load_model

try:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table
except ImportError as error:
    sys.exit(f"standard tasks need lm-eval: {how_to_install('evaluation')} ({error})")


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    get_attention(arguments.attention)  # one that is unknown is refused before anything is read
    folder = find_folder(arguments.model, download=True)
    metadata = {"pretrained": str(folder), **arguments.metadata}  # RULER makes samples with the model's tokenizer
    manager = TaskManager(include_path=arguments.include_path, metadata=metadata)
    asked = arguments.tasks.split(",")
    if unknown := [task for task in asked if not manager.match_tasks([task])]:
        raise ValueError(f"unknown task {unknown[0]!r}; lm-eval ls tasks lists all, and --include-path DIR adds others")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model, tokenizer = load_model(folder, dtype=dtype, device=device)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end of text, which lm-eval needs; set its eos_token and save it")
    whole = HFLM(pretrained=model, tokenizer=tokenizer)
    tasks = manager.match_tasks(asked)
    with use_attention(model, arguments.attention):
        results = simple_evaluate(whole, tasks=tasks, task_manager=manager, limit=arguments.limit, log_samples=False)
    results["config"]["attention"] = arguments.attention
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--tasks", required=True, help="names of lm-eval, groups or patterns, separated by commas")
    parser.add_argument("--attention", default="exact", help="in prefill: exact, muse, muse:Q8K32T0.1B2k, ...")
    parser.add_argument("--limit", type=int, help="samples per task, at most; scores of a part are not the benchmark's")
    parser.add_argument("--include-path", help="folder with YAML files of further tasks")
    parser.add_argument("--metadata", type=json.loads, default={}, help="JSON, as lm-eval's own --metadata")
    parser.add_argument("--output", type=Path, help="file for lm-eval's results, JSON")
    arguments = parser.parse_args()
    try:
        results = evaluate(arguments)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(" ".join(str(error).split()))
    for column in [name for name in ("results", "groups") if name in results]:
        print(make_table(results, column))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2, default=handle_non_serializable))
