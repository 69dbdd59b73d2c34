"""Tests that no image needs."""
