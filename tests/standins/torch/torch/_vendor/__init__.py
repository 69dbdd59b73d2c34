"""Other projects' modules."""
