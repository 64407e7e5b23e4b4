"""The laboratory of `muse_attention`: whatever trains and measures with the library, and the `muse` command.

`cli/`: the commands, one file each. `pretraining/`: corpora, the paper's decoder and a trainer. `evaluation/`: what
language models do under an attention, trained here or elsewhere. `benchmark/`: time and memory of single calls.
`records/`: results as files. `report/`: results as pages. `models.py` loads a model, `synthetic.py` makes inputs.

It imports the library, never the other way.
"""
