"""Measurements while a model trains.

`metrics.py`: a line for every update. `boards.py`: the same on TensorBoard, and on Weights & Biases. `probe.py`: beside
some updates, the attention's error by layer, and what follows from one that is too large (`error_limit.py`), and the
loss on answers to needles (`answer_losses.py`). `held_out.py`: evaluation on the held-out split.
"""
