"""Training runs compared: held-out loss under any attention, speed, and scaling laws."""
