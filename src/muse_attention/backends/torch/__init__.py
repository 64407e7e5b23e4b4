"""The far-field stages in vectorised PyTorch, for any device, with memory linear in the length.

`backend.py` is what the operators call. `far_field.py` runs the stages of the paper's method in order, and `blockwise/`
is the method with a tolerance.
"""
