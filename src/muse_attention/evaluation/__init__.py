"""Measurements of language models under any attention: fidelity of every head, loss, and needles in haystacks."""
