"""What a run keeps: `folder.py` on disk, `state.py` in memory and in every checkpoint.

`saving.py`: when checkpoints are written, if the disk has room for them. `continuing.py`: further updates of a finished
run. `trained_model.py`: the model at the end.
"""
