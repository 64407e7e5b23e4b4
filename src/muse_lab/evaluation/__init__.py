"""Measurements of language models under any attention, a folder each, with the results and their report.

`fidelity/`: the error of attention in every layer. `loss/`: the loss at every position of long texts. `needles/`: what
is found far back, with `lookups/` (whether it is attended to) and `gradients/` (whether it is learned from).
`comparison/`: training runs side by side. `texts.py` has the texts, `settings.py` the model and text of a measurement,
`fits.py` the curves through numbers.
"""
