"""What a checkpoint is made of, and how several ranks write and read one without any of them having all of it.

    manifest.py      the list of files with their hashes, and which part of which tensor is in which file
    shards.py        files of tensors: what one rank writes, and what is read of them
    together.py      several ranks save and load through torch.distributed.checkpoint
    agreement.py     ranks that share the work of verifying come to the same result
    background.py    a thread that writes while the run goes on

`checkpoints.py` is the folder that they are in.
"""
