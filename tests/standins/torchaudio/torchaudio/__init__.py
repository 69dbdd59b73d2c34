"""torchaudio, without any operator."""

__version__ = "@torchaudio@"
