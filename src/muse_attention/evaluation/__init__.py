"""Measurements of language models under any attention: fidelity of every head, loss, needles, and standard tasks."""
