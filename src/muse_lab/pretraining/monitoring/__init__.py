"""What is measured while a model trains.

`metrics.py`: a line for every update. `boards.py`: the same on TensorBoard, and on Weights & Biases. `probe.py`: beside
some updates, the attention's error by layer (`layer_errors.py`) and the loss on answers to needles
(`answer_losses.py`). `error_limit.py`: what follows from an error that is too large. `held_out.py`: evaluation on the
held-out split.
"""
