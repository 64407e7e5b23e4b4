"""The far-field stages in vectorised PyTorch, for any device, with memory linear in the length.

`backend.py` is what the operators call, and `far_field.py` runs the stages in order.
"""
