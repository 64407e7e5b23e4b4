"""Pretraining of language models with any attention of the library, as in the paper.

Before a run: `data/` makes a corpus of tokens from source code and texts, `needles/` hides needles in its files, for
training and for evaluation, and `model/` is the paper's decoder.

A run: `recipes.py` has its settings, `schedule.py` the learning rate at a step.
`training.py` sets it up: `initial_model.py` is the model, `batches.py` has the samples and `prefetch.py` reads them
ahead, `optimiser.py` is AdamW, `parallel.py` and `mesh_shape.py` share the work among ranks, `determinism.py` settles
precision and reproducibility. `loop.py` then makes one update after another, on documents that `document_mask.py` keeps
apart.

Around it: `run/` has the state of a run on disk and in memory, `checkpoints/` its files. `monitoring/` measures while a
model trains. `interruptions/` has the ways in which a run ends early.
"""
