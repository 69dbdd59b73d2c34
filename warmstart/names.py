"""Names that an image and those who run it agree on."""

from __future__ import annotations

VENV = "/opt/venv"  # the same path in every stage and image: torch.compile's keys hold absolute source paths
PYTHON = f"{VENV}/bin/python"
HOME = "/opt/warmstart"  # our own files inside the image
START = f"{HOME}/start"  # its entry point
LABEL = "io.warmstart."  # before the names of our own labels, of images and containers
PRESET = f"{LABEL}preset"  # of a container: what it serves
