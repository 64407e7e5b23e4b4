"""Measurements of language models under any attention: fidelity, loss, needles, standard tasks, and training runs."""
