"""Plans that fit: one way to decide per file."""
