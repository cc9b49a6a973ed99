"""Decisions carried out on a live model."""
