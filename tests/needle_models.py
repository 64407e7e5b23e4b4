"""What tests of needles share: a haystack, a tokenizer that knows its words, and models that fit both."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.data.corpus_documents import Buckets
from muse_lab.pretraining.data.prepare import CorpusSettings
from muse_lab.pretraining.data.tokenizer import tokenizer_files, train_tokenizer
from muse_lab.pretraining.needles.haystacks import TextHaystack
from muse_lab.pretraining.needles.writer import EVALUATION, TRAINING, NeedleWriter
from tests.lab.test_prepare import make, sources
from tests.models import tiny_llama

DEFINITION = re.compile(r"<filename>toolbox/(\w+)\.py\ndef (\w+?)(\d{8})\(\):\n")
QUESTION = re.compile(r"from toolbox\.(\w+) import (\w+?)(\d{8})")
WORDS = ("import", "def", "return", "self", "value", "for", "in", "range", "print", "\n    ", "\n", "=", "(x)", "42")


def texts(number: int = 40) -> list[tuple[str, str]]:
    """Paths and texts of 30 to 300 words."""
    rng = random.Random(0)
    return [(f"package/module{n}.py", " ".join(rng.choices(WORDS, k=rng.randint(30, 300)))) for n in range(number)]


def needle_tokenizer() -> Tokenizer:
    """Byte-level BPE of the texts and of many needles."""
    letters = train_tokenizer([text for _, text in texts()], 300)
    writer = NeedleWriter(letters)
    rng = random.Random(0)
    drawn = [needle for purpose in (TRAINING, EVALUATION) for needle in writer.draw(rng, purpose, 500)]
    written = [letters.decode(writer.questions([needle]).tokens.tolist()) for needle in drawn]
    return train_tokenizer([text for _, text in texts()] + written, 900)


def needle_haystack(tokenizer: Tokenizer) -> TextHaystack:
    return TextHaystack.encode(tokenizer, texts(), enough=10**6, source="made up")


def needle_corpus(tokenizer: Tokenizer, folder: Path) -> Corpus:
    """Its held-out split has more than one document, each shorter than a sample."""
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    settings = CorpusSettings(tokenizer=file, buckets=Buckets(64, 4096), held_out=0.3, tokens_per_shard=1000)
    return make(folder / "corpus", settings, sources(30))


def needle_llama(tokenizer: Tokenizer, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return tiny_llama(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2048, **changes)


def write_needle_model(folder: Path, tokenizer: Tokenizer) -> None:
    needle_llama(tokenizer).float().save_pretrained(folder)
    for name, content in tokenizer_files(tokenizer).items():
        (folder / name).write_text(content)


def write_texts(folder: Path) -> None:
    for path, text in texts():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def write_needle_folder(folder: Path, tokenizer: Tokenizer) -> Path:
    """What the command needs: `model` and `texts`."""
    (folder / "model").mkdir()
    write_needle_model(folder / "model", tokenizer)
    write_texts(folder / "texts")
    return folder
