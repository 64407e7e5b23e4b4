"""The loss of a model at every position of long texts, under one attention after another."""
