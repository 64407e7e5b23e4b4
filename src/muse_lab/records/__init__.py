"""Results and other small files, with the machine that they were measured on.

`stored_results.py`: results as one JSON file, from which a measurement continues. `files.py` and `untrusted.py`:
atomic writes, and reads of untrusted files. `captured_heads.py` and `eight_bits.py`: queries, keys and values of a
model. `attention_names.py`: names of attentions in records and reports. `means.py`: means over samples.
"""
