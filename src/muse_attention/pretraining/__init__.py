"""Pretraining of language models with any attention of the library, as in the paper.

Data, from sources to samples:

1. `repositories.py`: what a source gives. `sources.py`: Python's own libraries, folders, archives (`archives.py`) and
   texts. `datasets.py`: The Stack v2, with contents from Software Heritage (`contents.py`), and Dolma.
2. `filters.py`: which files are kept. `documents.py`: how the files of a repository become one document.
3. `tokenizer.py`: byte-level BPE. `spool.py`: documents on disk while there is no tokenizer yet.
4. `shards.py`: tokens on disk. `corpus.py`: the manifest, and reading what it lists.
5. `prepare.py`: all of that, in order.
6. `batches.py`: samples of a corpus, each a pure function of the seed, the step and the rank.
7. `mixture.py`: needle documents among them, of `needles.py` hidden in files of `haystacks.py`; `words.py`: their
   names.

The model: `decoder.py`, with `configuration.py`, `sliding_window.py` and `chunked_loss.py`.

Training: `training.py` is the loop. `run_folder.py`: what is on disk of a run, and who may work there. `recipes.py`:
what a run is made of. `schedule.py`: learning rate and attention at a step. `model.py`: the model of a recipe, and its
first weights. `reading.py`: batches, ahead of the loop. `optimiser.py`: AdamW, and what is learnt, by name.
`checkpoints.py`: that on disk, whole or absent. `probe.py`: the attention's error on the way, and what needles teach.
`metrics.py`: what is measured. `parallel.py`: one process, or several.
"""
