"""From sources to a corpus of tokens.

1. `repositories.py`: what a source gives. `sources.py`: Python's own libraries, `folders.py`, `archives.py` and texts.
   `datasets.py`: The Stack v2, with contents from Software Heritage (`contents.py`), and Dolma (`dataset_files.py`).
2. `filters.py`: which files are kept. `corpus_documents.py`: how the files of a repository become one document.
3. `tokenizer.py`: byte-level BPE. `spool.py`: documents on disk while there is no tokenizer yet.
4. `shards.py`: tokens on disk. `corpus.py`: the manifest, and reading what it lists.
5. `prepare.py`: all of that, in order.
"""
