"""What measurements mean: pure functions, no files, no clock."""
