"""What a run keeps: `folder.py` on disk, `state.py` in memory and in every checkpoint.

`saving.py`: when checkpoints are written, if they fit (`disk_space.py`). `continuing.py`: further updates of a finished
run. `trained_model.py`: the model at the end.
"""
