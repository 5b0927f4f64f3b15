"""Stand-ins for training, which take milliseconds and no torch."""
