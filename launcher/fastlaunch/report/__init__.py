"""A comparison for people and for programs: as a table, JSON or CSV."""
