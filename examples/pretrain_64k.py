"""On one GPU: the paper's smallest model at 64k, with exact attention and with MuSe on the same tokens, compared.

The arguments are folders of repositories or of source archives; without any, it is what is installed. After an
interruption, run it again. Needs the extras `cli`, `huggingface` and `pretraining`.
"""

import subprocess
import sys
from pathlib import Path

ATTENTIONS = {
    "exact": "exact",
    "muse": "muse:Q128K128R8SP1B8k",
    "frozen": "muse:Q128K128R8SP1B8k,differentiable_aggregation=false",
}
SHORT = ("steps=320", "warmup=32", "checkpoint_every=80", "keep=4", "probe_every=20")  # 42M tokens
FAST = ("recompute=false",)  # for some 20 GiB of memory


def muse(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "muse_lab.cli", *arguments], check=True)


if not Path("out/corpus/manifest.json").exists():
    muse("prepare", *sys.argv[1:], "--held-out", "0.05", "--output", "out/corpus")
for name, attention in ATTENTIONS.items():
    changes = (*SHORT, *FAST, f"attention={attention}")
    muse("train", "out/corpus", *changes, "--recipe", "s3", "--output", f"out/{name}", "--resume")
muse("compare", *(f"out/{name}" for name in ATTENTIONS), "--corpus", "out/corpus")
