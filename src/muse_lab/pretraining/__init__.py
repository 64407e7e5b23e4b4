"""Pretraining of language models with any attention of the library, as in the paper.

`data/` makes a corpus of tokens from source code and texts. `needles/` hides needles in its files, for training and for
evaluation. `model/` is the paper's decoder. The files here are the trainer, in this order:

1. `recipes.py`: what a run is made of. `schedule.py`: learning rate and attention at a step.
2. `initial_model.py`: the model of a recipe, and the weights it begins with.
3. `batches.py`: samples of a corpus, each a pure function of the seed, the step and the rank.
   `reading.py`: batches, read ahead of the loop.
4. `training.py`: the loop. `optimiser.py`: AdamW, and what is learnt, by name. `parallel.py`: one process, or several.
   `autocast.py` and `determinism.py`: precision, and the same bits twice.
5. `probing.py`: what is measured beside an update. `probe.py`: the attention's error, and what the model learns from
   needles. `error_limit.py`: what follows from an error that is too large. `evaluating.py`: held-out loss and needles.
   `metrics.py`: a line for every update. `boards.py`: TensorBoard, and Weights & Biases.
6. `run_folder.py`: what a run has on disk, and who may work there. `checkpoints.py`: its checkpoints, whole or absent.
   `checkpointing/`: what they are made of. `saving.py`: when they are made. `run_state.py`: what they keep beside
   tensors. `disk_space.py`: whether they fit.
7. `stopping.py`: signals and time limits. `guarding.py`: updates that are skipped. `failures.py`: runs that fail again
   and again. `watchdog.py`: runs that stand still. `ending.py`: the end of a process that does not end by itself.
"""
