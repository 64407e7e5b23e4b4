"""Results and other small files: written whole, read with suspicion, with the machine that they are of."""
