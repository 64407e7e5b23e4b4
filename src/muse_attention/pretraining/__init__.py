"""Pretraining of language models with any attention of the library, as in the paper."""
