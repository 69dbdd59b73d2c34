"""Prebuilt modules."""
