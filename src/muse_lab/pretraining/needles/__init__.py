"""Needle documents, for training and for evaluation: names to remember, hidden in files of source code.

`words.py`: the words of names. `writer.py`: needles as a tokenizer writes them. `haystacks.py`: the files they are
hidden in. `mixture.py`: needle documents in place of some samples of training. `samples.py`: those that ask a model.
"""
