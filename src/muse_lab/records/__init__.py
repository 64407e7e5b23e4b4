"""Results and other small files, with the machine that they were measured on.

`stored_results.py`: results as one JSON file, that a measurement goes on from. `files.py` and `regular_files.py`:
writing whole files, and reading those of others with suspicion. `captured_heads.py` and `eight_bits.py`: queries,
keys and values of a model. `attention_names.py`: what the recorded name of an attention says.
"""
