"""Measurements of language models under any attention of the library: fidelity of every head, loss, training runs."""
